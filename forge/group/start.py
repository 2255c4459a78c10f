"""Which group this process belongs to: itself alone, or the ranks of torch.distributed."""

from __future__ import annotations

import os

import torch.distributed as dist

from forge.errors import ConfigError
from forge.group.group import Group, Solo
from forge.group.ranks import Ranks
from forge.process import world


def group() -> Group:
    """The group of a Run that is being entered; with many ranks all of them enter at once.

    Raises:
        ConfigError: Where this process is one of many, and they do not know each other yet.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return Solo()
        return Ranks()
    found = world.of(os.environ)
    if found.size > 1:
        problem = (
            f"this process is rank {found.rank} of {found.size}, and torch.distributed is not"
            " initialised: call forge.distributed.init() before forge.Run is entered, on every"
            " rank, and give the Run the model in DistributedDataParallel."
        )
        raise ConfigError([problem], "This Run")
    return Solo()
