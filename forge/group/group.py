"""How an attempt coordinates with the other ranks of its job, if there are any.

The ranks agree on requests at step boundaries, and all-gather JSON values and errors: if a call
fails on one rank, it fails on all ranks.
"""

from __future__ import annotations

import errno
import json
import queue
from collections.abc import Callable
from typing import Any, NoReturn

from forge.errors import DamagedCheckpoint, Exit, ExitCode, ForgeError, RankFailed
from forge.group.requests import Consensus, Request, StopRequest

START_S = 300.0
"""Timeout in seconds for all ranks of a job to arrive at its start."""

MARGIN = 1
"""Boundaries that a rank can pass while the ranks are agreeing, so that it waits less."""


class Coordinator:
    """Coordinates this rank with all others; `collectives.enter_group` returns the one of a Run.

    This one is that of a process which is the only rank: its own requests count immediately.
    `StoreCoordinator` (`ranks.py`) does everything below for several ranks.

    Agreeing is neither a collective nor a barrier: a thread or a signal can make a request at any
    time, and a rank must not wait for another one that is blocked in a collective.
    """

    rank = 0
    """This process's rank, from 0."""
    size = 1
    """The number of ranks."""

    def __init__(self) -> None:
        self._proposed: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._agreed = Consensus()

    def propose(self, fact: Request) -> None:
        """Send a request to all ranks. From any thread or signal handler; never blocks."""
        self._proposed.put(fact)  # reentrant, unlike a lock

    def agreed(self, boundary: int) -> Consensus:
        """The requests that all ranks have at a step boundary; the same on each rank.

        Call it in the main thread at each boundary: it costs a comparison, and waits only while
        the ranks are agreeing on a request.

        Args:
            boundary: Number of boundaries passed before this one, including those rolled back.
        Raises:
            RankLost: If another rank does not answer.
        """
        while not self._proposed.empty():
            self._agreed = self._agreed.including(self._proposed.get())
        return self._agreed

    def adopt(self, fact: Request) -> None:
        """Agree on a request that all ranks have exchanged already, at the same boundary."""
        self._agreed = self._agreed.including(fact)

    def hold(self, boundary: int) -> None:
        """Stay at a boundary where the run can stop, until `let_go`; all ranks have to call it."""

    def held_stop(self) -> StopRequest | None:
        """The stop that all ranks have received while held, so that each can act immediately.

        A single rank stops at `agreed`.
        """
        return None

    def let_go(self) -> StopRequest | None:
        """Continue, unless all ranks have to stop at the boundary where they hold.

        Raises:
            RankLost: If another rank does not answer.
        """
        return None

    def publish(self, key: str, value: bytes) -> None:
        """Send this rank's value under a key, for a later `gather` of all ranks; does not wait.

        Raises:
            RankLost: If rank 0, which hosts the store, is gone.
        """

    def gather(
        self, key: str, value: bytes, timeout_s: float, unless: Callable[[], object] | None = None
    ) -> list[bytes]:
        """All-gather through the store: each rank's value, by rank. Use a key only once.

        Used at the start, at commits and around functions of `run.every`, in any thread. Returns
        an empty list if `unless` becomes true first.

        Raises:
            RankLost: If a rank does not send its value in time.
        """
        return [value]

    def forget(self, key: str) -> None:
        """Delete this rank's value under a key that every rank has gathered."""

    def lost(self, timeout_s: float) -> str:
        """Wait until the ranks can no longer agree, and return why; empty after the timeout."""
        return ""

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call `act`, in any thread, once ranks cannot agree: main can be in a collective."""

    def close(self, timeout_s: float) -> None:
        """Leave the group, together with the other ranks if they arrive in time."""


EXCHANGE_S = 1800.0
"""Timeout in seconds for a rank to write its files; if the run ends, the wait ends as well."""

_DAMAGE, _AGAIN, _END = 1, 2, 3
"""Weights of errors: an older checkpoint is read, the save is retried, the job ends."""


class Exchange:
    """All-gathers values through the store; each rank must make the same calls in the same order.

    Args:
        name: Unique among the exchanges of these ranks: another thread can have its own.
    """

    def __init__(self, ranks: Coordinator, name: str, timeout_s: float = EXCHANGE_S) -> None:
        self.ranks = ranks
        self._name = name
        self._timeout_s = timeout_s
        self._count = 0
        self._previous = ""

    def all_gather(
        self,
        what: str,
        make: Callable[[], Any],
        unless: Callable[[], object] | None = None,
        within_s: float | None = None,
    ) -> list[Any]:
        """All-gather the JSON result of `make`, in order of rank; empty once `unless` is true.

        Raises:
            OSError: If `make` raised one, here or on another rank.
            ForgeError: Likewise; if ranks raise different errors, one that ends the job wins.
        """
        if self.ranks.size == 1:
            return [make()]
        self._count += 1
        limit_s = self._timeout_s if within_s is None else within_s
        error: BaseException | None = None
        try:
            value = {"value": make()}
        except (Exception, Exit) as raised:  # noqa: BLE001 - raised again once all ranks know
            error, value = raised, _described(raised)
        key = f"{what} ({self._name} {self._count})"
        texts = self.ranks.gather(key, json.dumps(value).encode(), limit_s, unless)
        if not texts:
            return []
        if self._previous:  # all ranks have read it, or they would not be in this exchange
            self.ranks.forget(self._previous)
        self._previous = key
        found = [json.loads(text) for text in texts]
        worst = max((one.get("weight", 0), -rank) for rank, one in enumerate(found))
        if worst[0]:
            if error is not None and value["weight"] == worst[0]:
                raise error
            _raise_again(-worst[1], found[-worst[1]], error)
        return [one["value"] for one in found]

    def broadcast(self, what: str, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and broadcast its result."""
        return self.all_gather(what, make if self.ranks.rank == 0 else lambda: None)[0]


def _described(error: BaseException) -> dict[str, Any]:
    """An error as JSON; all ranks act on the error of the highest weight, so they do the same."""
    if isinstance(error, OSError):
        return {"error": str(error), "errno": error.errno or errno.EIO, "weight": _AGAIN}
    if isinstance(error, DamagedCheckpoint):
        return {"error": str(error), "weight": _DAMAGE}
    if isinstance(error, Exit):
        return {"error": error.text, "code": int(error.code or 0), "weight": _END}
    code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FORCED
    return {"error": f"{type(error).__name__}: {error}", "code": int(code), "weight": _END}


def _raise_again(rank: int, said: dict[str, Any], own: BaseException | None) -> NoReturn:
    text = f"rank {rank}: {said['error']}"
    if said["weight"] == _AGAIN:
        raise OSError(said["errno"], text) from own
    if said["weight"] == _DAMAGE:
        raise DamagedCheckpoint(text) from own
    raise RankFailed(text, said["code"]) from own
