"""`forge.distributed.init()`: initialise torch.distributed, however the ranks were started.

world = forge.distributed.init()      # srun, submitit, torchrun, forge's launchers
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
    """This process's rank, the number of ranks, and its device."""

    rank: int
    """The global rank, from 0."""
    size: int
    """The number of ranks."""
    local_rank: int
    """The rank among those on this node."""
    device: torch.device
    """This rank's GPU, which is set as the current device; the CPU if there is no GPU."""


def init(
    backend: str | None = None, *, timeout_s: float = 600.0, first_timeout_s: float = 1800.0
) -> World:
    """Initialise torch.distributed for this rank; a single process becomes the only rank.

    Rank and rendezvous address are read from the environment: from torchrun's variables (which
    forge's launchers and submitit's `TorchDistributedEnvironment` also set), or from those of a
    Slurm step. Afterwards RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are set for other libraries. A second call returns the same.

    Args:
        backend: As in `torch.distributed.init_process_group`; None: `cpu:gloo,cuda:nccl` if
            there is a GPU, else `gloo`.
        timeout_s: Timeout of collectives, in seconds.
        first_timeout_s: Timeout of the rendezvous, and of collectives until the first step of a
            `forge.Run` is done, since compiling, loading data and resuming can take long.
    Raises:
        ConfigError: If the environment is inconsistent or incomplete, or if there is no GPU for
            this rank.
        Exit: With code 70 if the rendezvous fails; a launcher then restarts the job.
    """
    found = world.of(os.environ)
    device = _device(found)
    if not dist.is_initialized():
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        _meet(found, backend, max(timeout_s, first_timeout_s))
        _pending_s[:] = [timeout_s]
    return World(dist.get_rank(), dist.get_world_size(), found.local_rank, device)


def _meet(found: world.RankInfo, backend: str, timeout_s: float) -> None:
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
            f"Rank {found.rank} of {found.size} could not join the rendezvous at"
            f" {found.address}:{found.port}: {first}. {world.UNSET}"
        )
        messages.say(str(lost))
        raise Exit(lost.exit_code, str(lost), lost.reason) from error


def _device(found: world.RankInfo) -> torch.device:
    """The GPU of this local rank; if only one GPU is visible, that one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    if found.local_rank >= count > 1:
        problem = (
            f"this is local rank {found.local_rank} of {found.local_size}, but this process sees"
            f" only {count} GPUs: start at most one rank per GPU, or assign one GPU to each task."
        )
        raise ConfigError([problem], "The job")
    device = torch.device("cuda", found.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def first_step_is_done() -> None:
    """Set the timeout of collectives to the `timeout_s` of `init`."""
    while _pending_s:
        of_torch.set_timeout(_pending_s.pop())
