"""Which group this process belongs to: itself alone, or the ranks of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from forge.errors import ConfigError
from forge.group.group import Group, Solo
from forge.group.ranks import Ranks
from forge.process import world


def group(folder: Callable[[], Path]) -> Group:
    """The group of a Run that is being entered; with many ranks all of them enter at once.

    Args:
        folder: Called on rank 0 of many; the job's `.forge`, where it leaves their secret.
    Raises:
        ConfigError: Where this process is one of many, and they do not know each other yet.
        RankLost: Where another rank does not come.
        OSError: Where the secret cannot be written.
    """
    check_met("before forge.Run is entered, on every rank", "This Run")
    return Ranks(folder) if place()[1] > 1 else Solo()


def place() -> tuple[int, int]:
    """The rank of this process and their number, as torch.distributed says; else it is alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def check_met(when: str, what: str) -> None:
    """That this process knows the others, where its environment says that there are some.

    Args:
        when: To call `forge.distributed.init`.
        what: Needs to know.
    Raises:
        ConfigError: Where it does not.
    """
    if dist.is_available() and dist.is_initialized():
        return
    found = world.of(os.environ)
    if found.size > 1:
        problem = (
            f"this process is rank {found.rank} of {found.size}, and torch.distributed is not"
            f" initialised: call forge.distributed.init() {when}. Where each of them is a training"
            " of its own, in a directory of its own, set FORGE_RANKS=1."
        )
        raise ConfigError([problem], what)
