"""Records what NVML answers to forge's health checks, on a machine with a GPU.

    python tests/support/record_nvml.py h100_idle

writes tests/support/nvml/h100_idle.json, which tests/health/test_gpu_driver.py then goes through.
It holds what the driver says of the GPUs, their UUIDs and the numbers of the processes on them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
from nvml_answers import FOLDER, key

from forge.health import nvml
from forge.health.attempt import CHECKS
from forge.health.check import Context, make
from forge.health.devices import own_devices


class Recorder:
    """pynvml, which writes down what it is asked. A handle is the first name that it was got by."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(pynvml, name)
        if not name.startswith("nvmlDeviceGet"):
            return found
        return functools.partial(self._ask, name, found)

    def _ask(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        question = key(name, *map(self._encoded, args))
        try:
            answer = function(*args)
        except pynvml.NVMLError as error:
            self.answers[question] = {"error": error.value}
            raise
        if isinstance(answer, pynvml.c_nvmlDevice_t):
            self._names.setdefault(_address(answer), question.replace(" ", "_"))
        self.answers[question] = self._encoded(answer)
        return answer

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, pynvml.c_nvmlDevice_t):
            return self._names[_address(value)]
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, ctypes.Union):
            return {"uiVal": value.uiVal}
        if isinstance(value, ctypes.Structure):
            return {name: self._encoded(getattr(value, name)) for name, *_ in value._fields_}
        if isinstance(value, pynvml.nvmlFriendlyObject):
            return {name: self._encoded(one) for name, one in vars(value).items()}
        is_many = isinstance(value, (list, tuple, ctypes.Array))
        return [self._encoded(one) for one in value] if is_many else value


def _address(value: Any) -> int:
    return ctypes.cast(value, ctypes.c_void_p).value or 0


def main() -> None:
    """Make every check of a GPU, and write down what was asked and answered."""
    recorder = Recorder()
    if nvml.driver() is None:
        sys.exit("no NVIDIA driver here")
    nvml.driver = lambda: recorder
    devices = tuple(own_devices())
    for check in CHECKS:
        if check.name in ("gpu_memory", "gpu_driver"):
            answer = make(check, Context(Path(), Path(), devices, is_beside=True))
            found = answer.finding
            print(f"{check.name}: {answer.error or (found and found.value) or 'no answer here'}")
    driver = pynvml.nvmlSystemGetDriverVersion()
    content = {"driver": driver, "binding": pynvml.__name__, "answers": recorder.answers}
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{sys.argv[1]}.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
