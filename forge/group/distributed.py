"""`forge.distributed.init()`: torch.distributed, whoever has started the ranks.

world = forge.distributed.init()      # a Slurm step, submitit, torchrun, forge's launchers
model = DistributedDataParallel(build().to(world.device))
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge import messages
from forge.compat import of_torch
from forge.errors import ConfigError, Exit, RankLost
from forge.process import world

_pending_s: list[float] = []
"""The timeout of collectives once the first step is done."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job."""

    rank: int
    """Its number, from 0."""
    size: int
    """How many ranks there are."""
    local_rank: int
    """Its number among those on this node."""
    device: torch.device
    """Its GPU, which is the current device; the CPU where there is none."""


def init(
    backend: str | None = None, *, timeout_s: float = 600.0, first_timeout_s: float = 1800.0
) -> World:
    """Initialise torch.distributed for this rank; a process that is alone is the only rank.

    Which rank this is and where they meet is read from the environment: torchrun's variables,
    which forge's launchers and submitit's `TorchDistributedEnvironment` set as well, or those of a
    Slurm step. RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set
    afterwards, for whatever else reads them. Called again, it says the same.

    Args:
        backend: As in `torch.distributed.init_process_group`; None: `cpu:gloo,cuda:nccl` where
            there is a GPU, else `gloo`.
        timeout_s: Seconds that a collective may take.
        first_timeout_s: The same until the first step of a `forge.Run` is done: compilers, data
            and checkpoints take their time. The ranks have to meet within it, too.
    Raises:
        ConfigError: Where the environment contradicts itself or lacks a part, and where there is
            no GPU for this rank.
        Exit: With code 70, where the ranks do not meet: the job is started again.
    """
    found = world.of(os.environ)
    device = _device(found)
    if not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        _meet(found, backend, max(timeout_s, first_timeout_s))
        _pending_s[:] = [timeout_s]
    return World(dist.get_rank(), dist.get_world_size(), found.local_rank, device)


def _meet(found: world.World, backend: str, timeout_s: float) -> None:
    options: dict[str, Any] = {"rank": found.rank, "world_size": found.size}
    if found.size == 1:
        options["store"] = vars(dist)["HashStore"]()
    else:
        os.environ.update(found.variables())
        options["init_method"] = "env://"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        first = str(error).partition("\n")[0]
        lost = RankLost(
            f"Rank {found.rank} of {found.size} has not met the others at"
            f" {found.address}:{found.port}: {first}"
        )
        messages.say(str(lost))
        raise Exit(lost.exit_code, str(lost), lost.reason) from error


def _device(found: world.World) -> torch.device:
    """Its own among those that it sees; one that sees a single GPU has been given that."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    if found.local_rank >= count > 1:
        problem = (
            f"this is rank {found.local_rank} of {found.local_size} on this node, which shows"
            f" {count} GPUs: start at most one rank for each, or give each its own."
        )
        raise ConfigError([problem], "The job")
    device = torch.device("cuda", found.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def first_step_is_done() -> None:
    """From now on a collective may take no longer than `init` was told."""
    while _pending_s:
        of_torch.set_timeout(_pending_s.pop())
