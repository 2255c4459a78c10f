"""The driver's handles for the CUDA devices of a task.

CUDA counts the devices in CUDA_VISIBLE_DEVICES, NVML all GPUs that this process can open. A device
whose GPU is ambiguous is left out: no check examines the GPU of another job.
Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from forge.errors import GpuGone
from forge.health import nvml
from forge.health.nvml import Gpu


def own_gpus(devices: Sequence[int]) -> list[Gpu]:
    """Find the GPUs of CUDA devices.

    Args:
        devices: The task's devices, by CUDA's numbers.
    Returns:
        The GPUs that are certain; none if there is no driver.
    Raises:
        pynvml.NVMLError: If there is a driver, but a query fails.
    """
    pynvml = nvml.driver() if devices else None
    if pynvml is None:
        return []
    handles = _accessible(pynvml)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and named.startswith(("GPU-", "MIG-")):
        found = _by_uuid(pynvml, handles, named.split(","))
    else:
        found = _by_number(pynvml, handles, named)
        if not _is_order_known(pynvml, handles) and len(devices) < len(handles):
            return []
    return [_gpu(pynvml, number, found[number]) for number in devices if number < len(found)]


def _accessible(pynvml: Any) -> list[Any]:
    """The GPUs that this process can open, those of its cgroup: CUDA sees no others.

    None for a GPU that no longer answers, so that the indices of the others stay the same.
    """
    found: list[Any] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            found.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            if not nvml.is_one_of(pynvml, error, ("NVML_ERROR_NO_PERMISSION",)):
                found.append(None)
    return found


def _by_number(pynvml: Any, handles: list[Any], named: str | None) -> list[Any]:
    """CUDA uses the numbers up to the first invalid one, and none at all if one is repeated."""
    numbers: list[int] = []
    for text in [str(n) for n in range(len(handles))] if named is None else named.split(","):
        if not text.strip().isdecimal() or int(text) >= len(handles):
            break
        numbers.append(int(text))
    is_valid = len(set(numbers)) == len(numbers)
    return [handles[number] for number in numbers] if is_valid else []


def _by_uuid(pynvml: Any, handles: list[Any], names: list[str]) -> list[Any]:
    """The UUID of a GPU can be abbreviated, if the prefix is unique."""
    found: list[Any] = []
    for name in names:
        if name.startswith("MIG-"):
            part = _known(pynvml, "HandleByUUID", name)
            meant = [part and _known(pynvml, "DeviceHandleFromMigDeviceHandle", part)]
        else:
            meant = [one for one in handles if _known(pynvml, "UUID", one).startswith(name)]
        if len(meant) != 1 or not meant[0]:
            break
        found += meant
    return found


def _is_order_known(pynvml: Any, handles: list[Any]) -> bool:
    """NVML counts by PCI bus. CUDA does so on request, and otherwise begins with the fastest."""
    is_same = len({_known(pynvml, "Name", one) for one in handles} - {""}) <= 1
    return is_same or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _known(pynvml: Any, question: str, handle: Any) -> Any:
    """The answer of a GPU, possibly of another job; an empty text if it does not answer."""
    try:
        return Gpu(pynvml, handle, "").ask(question) or ""
    except (GpuGone, pynvml.NVMLError):
        return ""  # the checks of the job that has this GPU report it


def _gpu(pynvml: Any, number: int, handle: Any) -> Gpu:
    uuid, bus = _known(pynvml, "UUID", handle), _known(pynvml, "PciInfo", handle)
    if not uuid:
        return Gpu(pynvml, None, f"GPU {number}")
    modes = _known(pynvml, "MigMode", handle)
    name = f"GPU {number} ({uuid}, {bus and bus.busId})"
    return Gpu(pynvml, handle, name, is_split=bool(modes and modes[0]))
