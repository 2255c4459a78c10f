"""The ranks of torch.distributed: the group of a Run, and the collectives during training.

Flags are int32[n], reduced by MAX or MIN.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge.errors import ConfigError
from forge.group.group import Coordinator
from forge.process import sections, world
from forge.process.progress import Phase


def enter_group(folder: Callable[[], Path]) -> Coordinator:
    """The group of a Run that is being entered; several ranks have to enter it together.

    Args:
        folder: Called on rank 0 of several; returns the job's `.forge`, for the ranks' secret.
    Raises:
        ConfigError: If there are several ranks, but torch.distributed is not initialised.
        RankLost: If another rank does not arrive.
        OSError: If the secret cannot be written.
    """
    check_met("before forge.Run is entered, on every rank", "This Run")
    if num_ranks() == 1:
        return Coordinator()
    from forge.group.ranks import StoreCoordinator  # one process needs none of its parts

    return StoreCoordinator(folder)


def largest_of_ranks(values: list[int], device: torch.device | None = None) -> list[int]:
    """The elementwise maximum over all ranks; a collective if there are several ranks."""
    if num_ranks() == 1:
        return values
    agreed = torch.tensor(values, dtype=torch.int32, device=_meeting_device(device))
    with sections.current().inside(Phase.collective):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.tolist()


def finite_on_all_ranks(value: torch.Tensor) -> Callable[[], bool]:
    """Start an asynchronous all-reduce: is a number finite on every rank?

    Returns:
        A function that waits for the answer, the only host synchronisation. The collective runs
        in the background until then; with a single rank there is no collective.
    """
    if num_ranks() == 1:
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
    return sections.current().inside(Phase.collective)


def num_ranks() -> int:
    """The number of ranks."""
    return rank_and_size()[1]


def rank_and_size() -> tuple[int, int]:
    """(rank, number of ranks) from torch.distributed; (0, 1) if it is not initialised."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    return (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())


def check_met(when: str, what: str) -> None:
    """Check that torch.distributed is initialised if the environment names several ranks.

    Args:
        when: For the error: when to call `forge.distributed.init`.
        what: For the error: what needs the other ranks.
    Raises:
        ConfigError: If it is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return
    found = world.of(os.environ)
    if found.size > 1:
        problem = (
            f"this process is rank {found.rank} of {found.size}, but torch.distributed is not"
            f" initialised: call forge.distributed.init() {when}. If the processes are independent"
            " trainings, each in its own directory, set FORGE_RANKS=1."
        )
        raise ConfigError([problem], what)


def _meeting_device(device: torch.device | None) -> torch.device:
    """The device on which to reduce a value that is on `device`.

    The same device if it has its own backend (`cpu:gloo,cuda:nccl`), so that the host need not
    wait for a copy.
    """
    backend_of = backends()
    on_host = backend_of.get("cpu")
    if device is not None and backend_of.get(device.type, on_host) != on_host:
        return device
    return torch.device("cuda" if on_host is None else "cpu")


def backends() -> dict[str, str]:
    """Type of device -> its backend in the default process group."""
    return dict(one.split(":") for one in str(dist.get_backend_config()).split(","))
