"""Which group this process belongs to: itself alone, or the ranks of torch.distributed."""

from __future__ import annotations

import os

import torch.distributed as dist

from forge.errors import ConfigError
from forge.group.group import Group, Solo
from forge.group.ranks import Ranks


def group() -> Group:
    """The group of a Run that is being entered; with many ranks all of them enter at once.

    Raises:
        ConfigError: Where this process is one of many, and they do not know each other yet.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return Solo()
        return Ranks()
    size = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and size.isdecimal() and int(size) > 1:
        problem = (
            f"this process is rank {os.environ['RANK']} of {size} (RANK, WORLD_SIZE), and"
            " torch.distributed is not initialised: call torch.distributed.init_process_group()"
            " before forge.Run is entered, on every rank."
        )
        raise ConfigError([problem], "This Run")
    return Solo()
