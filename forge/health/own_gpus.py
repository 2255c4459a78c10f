"""Which GPUs, as the driver knows them, the CUDA devices of a task are.

CUDA counts the devices that CUDA_VISIBLE_DEVICES names, NVML those that this process may open. A
device of which it is not known which GPU it is, is left out: no check looks at somebody else's.
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
    """Find the GPUs that CUDA devices are, or are parts of.

    Args:
        devices: The task's own, as CUDA counts.
    Returns:
        Those that can be told; none where there is no driver.
    Raises:
        pynvml.NVMLError: Where the driver is there, and cannot be asked.
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
    """The GPUs that this process may open, as those of its cgroup: CUDA sees no others.

    None for one that no longer answers: it may be somebody else's, and the others keep their place.
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
    """CUDA takes the numbers up to the first that is none; where one comes twice it takes none."""
    numbers: list[int] = []
    for text in [str(n) for n in range(len(handles))] if named is None else named.split(","):
        if not text.strip().isdecimal() or int(text) >= len(handles):
            break
        numbers.append(int(text))
    is_valid = len(set(numbers)) == len(numbers)
    return [handles[number] for number in numbers] if is_valid else []


def _by_uuid(pynvml: Any, handles: list[Any], names: list[str]) -> list[Any]:
    """The UUID of a GPU may be cut short, where one GPU alone begins so."""
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
    """NVML counts by the PCI bus. CUDA does so on demand, and else begins with the fastest."""
    is_same = len({_known(pynvml, "Name", one) for one in handles} - {""}) <= 1
    return is_same or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _known(pynvml: Any, question: str, handle: Any) -> Any:
    """What a GPU that may be somebody else's says; an empty text where it does not answer."""
    try:
        return Gpu(pynvml, handle, "").ask(question) or ""
    except (GpuGone, pynvml.NVMLError):
        return ""  # whoever has it is to know


def _gpu(pynvml: Any, number: int, handle: Any) -> Gpu:
    uuid, bus = _known(pynvml, "UUID", handle), _known(pynvml, "PciInfo", handle)
    if not uuid:
        return Gpu(pynvml, None, f"GPU {number}")
    modes = _known(pynvml, "MigMode", handle)
    name = f"GPU {number} ({uuid}, {bus and bus.busId})"
    return Gpu(pynvml, handle, name, is_split=bool(modes and modes[0]))
