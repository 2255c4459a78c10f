"""The calls of `run.steps`, in order: where each is in its data, and which a break has ended."""

from __future__ import annotations

from typing import Any

from forge.data.position import Position


class Calls:
    """What a checkpoint knows of the loops that were begun."""

    def __init__(self) -> None:
        self.positions: list[Position | dict[str, Any] | None] = []
        """One a call; a call that was over before it began keeps the state it was loaded with."""
        self.broken_off: set[int] = set()
        """Which calls a break has ended."""
        self._break: tuple[int, int] | None = None
        """The call and the step of the last break."""

    @property
    def epoch(self) -> int:
        """The epoch of the loader that is being read; 0 without one."""
        position = self.positions[-1] if self.positions else None
        return position.epoch if isinstance(position, Position) else 0

    def states(self) -> list[Any]:
        """The place of every call, for a checkpoint."""
        return [p.state() if isinstance(p, Position) else p for p in self.positions]

    def begin(self, position: Position | dict[str, Any] | None) -> None:
        """Another call of `run.steps`."""
        self.positions.append(position)
        self._break = None

    def break_off(self, call: int, step: int) -> None:
        """A call's generator was closed in this step: by a break, or by an error."""
        self.broken_off.add(call)
        self._break = (call, step)

    def take_break_back(self) -> int | None:
        """It was an error: the step in which the loop still stands; None where no loop does."""
        if self._break is None:
            return None
        call, step = self._break
        self.broken_off.discard(call)
        return step

    def close(self) -> None:
        """Give the loaders' iterators up."""
        for position in self.positions:
            if isinstance(position, Position):
                position.close()
