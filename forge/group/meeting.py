"""Ranks that meet by themselves, outside a training: those that do not come are named."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from forge.errors import RankLost
from forge.process.world import World

_LOOK_S = 0.05


def meet(world: World, timeout_s: float, collectives_s: float, *, is_hosted: bool) -> None:
    """Make all ranks those of `torch.distributed`, on gloo.

    Args:
        world: This rank.
        timeout_s: Seconds that the others may take to come.
        collectives_s: Seconds that a collective may take then.
        is_hosted: Whether the store is there already, as below torchrun.
    Raises:
        RankLost: Where a rank does not come, or rank 0, which hosts the store, is not reached.
    """
    place = f"{world.address}:{world.port}"
    try:
        store: Any = vars(dist)["TCPStore"](
            world.address,
            world.port,
            is_master=world.rank == 0 and not is_hosted,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        keys = [f"forge/meeting/{rank}" for rank in range(world.size)]
        store.set(keys[world.rank], "here")
        deadline = time.monotonic() + timeout_s
        while not store.check(keys):
            if time.monotonic() >= deadline:
                gone = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                raise RankLost(
                    f"rank {', '.join(gone[:16])} of {world.size} has not come to {place} within"
                    f" {timeout_s:g} s"
                )
            time.sleep(_LOOK_S)
        dist.init_process_group(
            "gloo",
            store=vars(dist)["PrefixStore"]("forge/meeting/gloo", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=collectives_s),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        first = str(error).partition("\n")[0]
        raise RankLost(
            f"rank {world.rank} of {world.size} has not met the others at {place}: {first}"
        ) from error
