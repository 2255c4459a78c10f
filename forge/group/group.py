"""How an attempt coordinates with the other ranks of its job, if there are any."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from forge.group.facts import Consensus, Request, StopRequest

START_S = 300.0
"""Timeout in seconds for all ranks of a job to arrive at its start."""

MARGIN = 1
"""Boundaries that a rank can pass while the ranks are agreeing, so that it waits less."""


class Coordinator(Protocol):
    """Coordinates this rank with all others; `collectives.enter_group` returns the one of a Run.

    Agreeing is neither a collective nor a barrier: a thread or a signal can make a request at any
    time, and a rank must not wait for another one that is blocked in a collective.
    """

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def propose(self, fact: Request) -> None:
        """Send a request to all ranks. From any thread or signal handler; never blocks."""

    def agreed(self, boundary: int) -> Consensus:
        """The requests that all ranks have at a step boundary; the same on each rank.

        Call it in the main thread at each boundary: it costs a comparison, and waits only while
        the ranks are agreeing on a request.

        Args:
            boundary: Number of boundaries passed before this one, including those rolled back.
        Raises:
            RankLost: If another rank does not answer.
        """

    def adopt(self, fact: Request) -> None:
        """Agree on a request that all ranks have exchanged already, at the same boundary."""

    def hold(self, boundary: int) -> None:
        """Stay at a boundary where the run can stop, until `let_go`; all ranks have to call it."""

    def held_stop(self) -> StopRequest | None:
        """The stop that all ranks have received while held, so that each can act immediately."""

    def let_go(self) -> StopRequest | None:
        """Continue, unless all ranks have to stop at the boundary where they hold.

        Raises:
            RankLost: If another rank does not answer.
        """

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

    def forget(self, key: str) -> None:
        """Delete this rank's value under a key that every rank has gathered."""

    def lost(self, timeout_s: float) -> str:
        """Wait until the ranks can no longer agree, and return why; empty after the timeout."""

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call `act`, in any thread, once ranks cannot agree: main can be in a collective."""

    def close(self, timeout_s: float) -> None:
        """Leave the group, together with the other ranks if they arrive in time."""


class SingleProcess:
    """A process that is the only rank: its own requests count immediately."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._proposed: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._agreed = Consensus()

    def propose(self, fact: Request) -> None:
        """See `Coordinator.propose`; `SimpleQueue.put` is reentrant, unlike a lock."""
        self._proposed.put(fact)

    def agreed(self, boundary: int) -> Consensus:
        """See `Coordinator.agreed`."""
        while not self._proposed.empty():
            self._agreed = self._agreed.including(self._proposed.get())
        return self._agreed

    def adopt(self, fact: Request) -> None:
        """See `Coordinator.adopt`."""
        self._agreed = self._agreed.including(fact)

    def hold(self, boundary: int) -> None:
        """See `Coordinator.hold`."""

    def held_stop(self) -> StopRequest | None:
        """See `Coordinator.held_stop`; a single rank stops at `agreed`."""
        return None

    def let_go(self) -> StopRequest | None:
        """See `Coordinator.let_go`."""
        return None

    def publish(self, key: str, value: bytes) -> None:
        """See `Coordinator.publish`."""

    def gather(
        self, key: str, value: bytes, timeout_s: float, unless: Callable[[], object] | None = None
    ) -> list[bytes]:
        """See `Coordinator.gather`."""
        return [value]

    def forget(self, key: str) -> None:
        """See `Coordinator.forget`."""

    def lost(self, timeout_s: float) -> str:
        """See `Coordinator.lost`."""
        return ""

    def when_lost(self, act: Callable[[], None]) -> None:
        """See `Coordinator.when_lost`."""

    def close(self, timeout_s: float) -> None:
        """See `Coordinator.close`."""
