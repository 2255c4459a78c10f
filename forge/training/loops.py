"""The loops over `run.steps`, in order: where each is in its data, and which a break has ended."""

from __future__ import annotations

from typing import Any

from forge.data.position import Position


class Loops:
    """What a checkpoint knows of the loops that were begun."""

    def __init__(self) -> None:
        self.positions: list[Position | dict[str, Any] | None] = []
        """One a call; a call that was over before it began keeps the state it was loaded with."""
        self.broken_off: set[int] = set()
        """Which calls a break has ended."""

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

    def close(self) -> None:
        """Give the loaders' iterators up."""
        for position in self.positions:
            if isinstance(position, Position):
                position.close()
