"""The ranks of a job, as its session sees them."""

from __future__ import annotations

import queue
from typing import Protocol

from forge.group.facts import Agreed, Fact


class Group(Protocol):
    """All ranks, and this one among them.

    Agreement is no collective and no barrier: a thread or a signal may bring a fact at any time,
    and no rank may wait for another that stands in a collective.
    """

    rank: int
    size: int

    def propose(self, fact: Fact) -> None:
        """Let all ranks know. From any thread, or a signal handler; never blocks."""

    def agreed(self, step: int) -> Agreed:
        """What all ranks know at the boundary after so many steps; the same on each of them.

        Main thread, at each boundary: costs a comparison, and waits only while a round is open.
        """

    def gather(self, key: str, value: bytes, timeout_s: float) -> list[bytes]:
        """What each rank has given under this key, by rank; at the start and at a commit alone."""


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

    def agreed(self, step: int) -> Agreed:
        """See `Group.agreed`."""
        while not self._proposed.empty():
            self._agreed = self._agreed.including(self._proposed.get())
        return self._agreed

    def gather(self, key: str, value: bytes, timeout_s: float) -> list[bytes]:
        """See `Group.gather`."""
        return [value]
