"""What is recorded on a device is what a test finds again, in the types that pynvml has."""

import ctypes
import json
from pathlib import Path

import pynvml
import record_nvml
from nvml_answers import FakeNvml

from forge.health import gpu_driver, gpu_memory, nvml
from forge.health.check import Context

HANDLES = [ctypes.cast(0x1000 * (n + 1), pynvml.c_nvmlDevice_t) for n in range(2)]


def number(handle):
    return ctypes.cast(handle, ctypes.c_void_p).value // 0x1000 - 1


def raises(error):
    def function(*args):
        raise pynvml.NVMLError(error)

    return function


def fields(handle, wanted):
    values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
    values[0].fieldId, values[0].value.uiVal = wanted[0], number(handle)
    return values


def processes_of(handle):
    found = pynvml.c_nvmlProcessInfo_v3_t(pid=1, usedGpuMemory=3 << 30)
    return [pynvml.nvmlStructToFriendlyObject(found)]


ANSWERS = {
    "Count": lambda: 2,
    # As ctypes has it: another object for each call, with the same address.
    "HandleByIndex": lambda n: ctypes.cast(HANDLES[n], pynvml.c_nvmlDevice_t),
    "Name": lambda handle: "NVIDIA H100",
    "UUID": lambda handle: f"GPU-{number(handle)}",
    "PciInfo": lambda handle: pynvml.nvmlPciInfo_t(busId=b"00000000:1B:00.0"),
    "MigMode": lambda handle: [0, 0],
    "TotalEccErrors": lambda handle, kind, since: number(handle) * 5,
    "RemappedRows": lambda handle: (1, 0, 0, 0),
    "FieldValues": fields,
    "ComputeRunningProcesses_v3": processes_of,
}


def test_a_recording_answers_as_the_device_did(tmp_path, monkeypatch, capsys):
    """Else whoever has a GPU would record what no test can read."""
    for name, function in ANSWERS.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", function)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "570.00")
    monkeypatch.setattr(nvml, "driver", lambda: pynvml)
    monkeypatch.setattr(gpu_memory, "_knows_pids", lambda: True)
    monkeypatch.setattr(record_nvml, "own_devices", lambda: [0, 1])
    monkeypatch.setattr(record_nvml, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["record_nvml.py", "made"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    expected = findings()
    record_nvml.main()
    content = json.loads((tmp_path / "made.json").read_text())
    assert content["driver"] == "570.00"
    monkeypatch.setattr(nvml, "driver", lambda: FakeNvml(content["answers"]))
    assert findings() == expected
    assert all(one.is_failed for one in expected.values())
    said = "gpu_driver: GPU 1 (GPU-1, 00000000:1B:00.0): uncorrected memory errors"
    assert said in capsys.readouterr().out


def findings():
    """What each check of GPUs finds."""
    context = Context(Path(), Path(), (0, 1))
    return {look.__name__: look(context) for look in (gpu_memory.gpu_memory, gpu_driver.gpu_driver)}
