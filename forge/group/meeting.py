"""Ranks that meet by themselves, outside a training: those that do not come are named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from forge.errors import RankLost
from forge.process.world import World

_LOOK_S = 0.05
_LEAVE_S = 5.0
"""Seconds that rank 0, which hosts the store, waits for those that have come."""


class Meeting:
    """A store in which the ranks of a job find each other, each within `timeout_s`.

    Args:
        world: This rank.
        timeout_s: Seconds that the others may take to come.
        is_hosted: Whether the store is there already, as below torchrun.
    Raises:
        RankLost: Where rank 0, which hosts it, cannot be reached.
    """

    def __init__(self, world: World, timeout_s: float, *, is_hosted: bool) -> None:
        self._world = world
        self.missing: list[int] = []
        """The ranks that have not come; the same on each that has."""
        try:
            self._store: Any = vars(dist)["TCPStore"](
                world.address,
                world.port,
                is_master=world.rank == 0 and not is_hosted,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
            self._say("here", None)
            self.missing = self._decide(timeout_s)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            first = str(error).partition("\n")[0]
            raise RankLost(
                f"Rank {world.rank} of {world.size} has not met rank 0 at"
                f" {world.address}:{world.port} within {timeout_s:g} s: {first}"
            ) from error

    def _decide(self, timeout_s: float) -> list[int]:
        """Rank 0 does, and the others hear of it."""
        if self._world.rank == 0:
            missing = sorted(set(range(self._world.size)) - set(self._heard("here", timeout_s)))
            self._store.set("forge/doctor/missing", json.dumps(missing))
        # It has waited as long as this one, and counts a moment later.
        self._store.set_timeout(timedelta(seconds=2 * timeout_s + _LEAVE_S))
        found: list[int] = json.loads(self._store.get("forge/doctor/missing"))
        return found

    def initialise(self, timeout_s: float) -> None:
        """Make them the ranks of `torch.distributed`, on gloo; where none is missing."""
        dist.init_process_group(
            "gloo",
            store=vars(dist)["PrefixStore"]("forge/doctor/gloo", self._store),
            rank=self._world.rank,
            world_size=self._world.size,
            timeout=timedelta(seconds=timeout_s),
        )

    def gather(self, what: str, value: Any, timeout_s: float) -> dict[int, Any]:
        """What each rank that has come says, by rank, on rank 0; elsewhere nothing."""
        self._say(what, value)
        return self._heard(what, timeout_s) if self._world.rank == 0 else {}

    def answer(self, make: Callable[[], int], timeout_s: float) -> int:
        """What it returns on rank 0, to all; and the end of the meeting."""
        if self._world.rank == 0:
            found = make()
            self._store.set("forge/doctor/answer", str(found))
        else:
            self._store.set_timeout(timedelta(seconds=timeout_s))
            found = int(self._store.get("forge/doctor/answer"))
        self.gather("bye", None, _LEAVE_S)
        return found

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"forge/doctor/{what}/{self._world.rank}", json.dumps(value))

    def _heard(self, what: str, timeout_s: float) -> dict[int, Any]:
        """What has been said until then, or by all that have come."""
        awaited = set(range(self._world.size)) - set(self.missing)
        keys = {rank: f"forge/doctor/{what}/{rank}" for rank in sorted(awaited)}
        deadline = time.monotonic() + timeout_s
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        come = [rank for rank, key in keys.items() if self._store.check([key])]
        return {rank: json.loads(self._store.get(keys[rank])) for rank in come}
