"""The ranks of a job, as its session sees them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from forge.group.facts import Agreed, Fact, StopAsked


class Group(Protocol):
    """All ranks, and this one among them.

    Agreement is no collective and no barrier: a thread or a signal may bring a fact at any time,
    and no rank may wait for another that stands in a collective.
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def propose(self, fact: Fact) -> None:
        """Let all ranks know. From any thread, or a signal handler; never blocks."""

    def agreed(self, boundary: int) -> Agreed:
        """What all ranks know at a boundary; the same on each of them.

        Main thread, at each boundary: costs a comparison, and waits only while a round is open.

        Args:
            boundary: How many the run has come to before it, rolled back or not.
        Raises:
            RankLost: Where another rank does not answer.
        """

    def hold(self, boundary: int) -> None:
        """This rank stays at a boundary that it could stop at, until `let_go`; all do, or will."""

    def held_stop(self) -> StopAsked | None:
        """The stop that all ranks know of while they hold: each may act on it at once."""

    def let_go(self) -> StopAsked | None:
        """Go on, unless all are to stop where they hold.

        Raises:
            RankLost: Where another rank does not answer.
        """

    def gather(
        self, key: str, value: bytes, timeout_s: float, unless: Callable[[], object] | None = None
    ) -> list[bytes]:
        """What each rank has given under this key, by rank; a key serves once.

        At the start, at a commit and around functions of `run.every`; in any thread. Nothing where
        `unless` comes true first.

        Raises:
            RankLost: Where a rank has not given anything in time.
        """

    def forget(self, key: str) -> None:
        """Give up what this rank has given under a key that every rank has gathered."""

    def lost(self, timeout_s: float) -> str:
        """Why the ranks can no longer agree, once they cannot; empty where that does not come."""

    def when_lost(self, act: Callable[[], None]) -> None:
        """Call it once they cannot, from any thread: the main thread may stand in a collective."""

    def close(self, timeout_s: float) -> None:
        """Leave the group, all ranks together where they come in time."""


class Solo:
    """The only rank: what it knows, all know."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._proposed: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self._agreed = Agreed()

    def propose(self, fact: Fact) -> None:
        """See `Group.propose`; `SimpleQueue.put` may interrupt itself, a lock may not."""
        self._proposed.put(fact)

    def agreed(self, boundary: int) -> Agreed:
        """See `Group.agreed`."""
        while not self._proposed.empty():
            self._agreed = self._agreed.including(self._proposed.get())
        return self._agreed

    def hold(self, boundary: int) -> None:
        """See `Group.hold`."""

    def held_stop(self) -> StopAsked | None:
        """See `Group.held_stop`; who is alone need not ask."""
        return None

    def let_go(self) -> StopAsked | None:
        """See `Group.let_go`."""
        return None

    def gather(
        self, key: str, value: bytes, timeout_s: float, unless: Callable[[], object] | None = None
    ) -> list[bytes]:
        """See `Group.gather`."""
        return [value]

    def forget(self, key: str) -> None:
        """See `Group.forget`."""

    def lost(self, timeout_s: float) -> str:
        """See `Group.lost`."""
        return ""

    def when_lost(self, act: Callable[[], None]) -> None:
        """See `Group.when_lost`."""

    def close(self, timeout_s: float) -> None:
        """See `Group.close`."""
