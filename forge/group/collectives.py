"""What ranks find out by a collective while they train.

Flags are int32[n], reduced by MAX or MIN.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from forge.process import sections
from forge.process.progress import Section


def any_rank(*, flag: bool, device: torch.device | None = None) -> bool:
    """Whether `flag` is set on any rank, so that none steps alone."""
    return bool(largest_of_ranks([flag], device)[0])


def largest_of_ranks(values: list[int], device: torch.device | None = None) -> list[int]:
    """The largest of each that any rank has; a collective where there are several."""
    if place()[1] == 1:
        return values
    agreed = torch.tensor(values, dtype=torch.int32, device=_meeting_device(device))
    with sections.current().inside(Section.collective):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.tolist()


def finite_on_all_ranks(value: torch.Tensor) -> Callable[[], bool]:
    """Begin to find out whether a number is finite on every rank.

    Returns:
        What waits for the answer: the only host synchronisation. Until then the ranks' collective
        is under way beside what this one does; where there is one rank there is none.
    """
    if place()[1] == 1:
        return lambda: math.isfinite(value.item())
    is_finite = value.isfinite().to(_meeting_device(value.device), torch.int32)
    work = dist.all_reduce(is_finite, op=dist.ReduceOp.MIN, async_op=True)

    def answer() -> bool:
        with _waiting_for(work):
            work.wait()
            return bool(is_finite.item())

    return answer


def _waiting_for(work: Any) -> contextlib.AbstractContextManager[None]:
    if work.is_completed():
        return contextlib.nullcontext()
    return sections.current().inside(Section.collective)


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    return (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())


def _meeting_device(device: torch.device | None) -> torch.device:
    """Where the ranks' collectives take a value from that lies on `device`.

    There, if the device has a backend of its own (`cpu:gloo,cuda:nccl`): the host need not wait.
    """
    backend_of = backends()
    on_host = backend_of.get("cpu")
    if device is not None and backend_of.get(device.type, on_host) != on_host:
        return device
    return torch.device("cuda" if on_host is None else "cpu")


def backends() -> dict[str, str]:
    """Type of device -> the backend that the default group has for it."""
    return dict(one.split(":") for one in str(dist.get_backend_config()).split(","))
