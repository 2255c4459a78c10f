"""Create the group of a Run: a single process, or the ranks of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from forge.errors import ConfigError
from forge.group.collectives import num_ranks
from forge.group.group import Coordinator, SingleProcess
from forge.process import world


def group(folder: Callable[[], Path]) -> Coordinator:
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
        return SingleProcess()
    from forge.group.ranks import StoreCoordinator  # one process needs none of its parts

    return StoreCoordinator(folder)


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
