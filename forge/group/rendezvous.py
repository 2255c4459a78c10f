"""Initialise torch.distributed outside training, with an error that names the missing ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from forge.errors import RankLost
from forge.group import store
from forge.process.world import UNSET, RankInfo

_LOOK_S = 0.05


def meet(world: RankInfo, timeout_s: float, collectives_s: float, *, is_hosted: bool) -> None:
    """Initialise `torch.distributed` with gloo.

    Args:
        world: This rank.
        timeout_s: Timeout of the rendezvous, in seconds.
        collectives_s: Timeout of collectives, in seconds.
        is_hosted: Whether the store exists already, as under torchrun.
    Raises:
        RankLost: If a rank does not arrive, or rank 0, which hosts the store, is unreachable.
    """
    address = f"{world.address}:{world.port}"
    is_local = world.local_size == world.size and not is_hosted
    try:
        if world.rank == 0 and not is_hosted:
            meeting = store.host(is_local=is_local, port=world.port)
        else:
            address = store.LOOPBACK if is_local else world.address
            meeting = store.connect(address, world.port, timeout_s)
        keys = [f"forge/meeting/{rank}" for rank in range(world.size)]
        meeting.set(keys[world.rank], "here")
        deadline = time.monotonic() + timeout_s
        while not meeting.check(keys):
            if time.monotonic() >= deadline:
                raise store.timeout(meeting, keys, timeout_s, f"at {address}")
            time.sleep(_LOOK_S)
        dist.init_process_group(
            "gloo",
            store=vars(dist)["PrefixStore"]("forge/meeting/gloo", meeting),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=collectives_s),
        )
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        first = str(error).partition("\n")[0]
        raise RankLost(
            f"rank {world.rank} of {world.size} could not join the rendezvous at {address}:"
            f" {first}. {UNSET}"
        ) from error
