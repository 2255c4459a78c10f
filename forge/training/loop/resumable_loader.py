"""`run.loader`: a second source of batches, whose position is saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from forge.data.position import Position
from forge.errors import StateMismatch
from forge.state import rng
from forge.training.start import preflight

_Batch = TypeVar("_Batch")


class ResumableLoader(Iterator[_Batch]):
    """Returns batches with `next()`; starts a new pass when the loader ends."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def __next__(self) -> _Batch:
        batch: _Batch = self._position.next()
        with preflight.exits():
            self._position.check("the loader given to run.loader")
        return batch

    @property
    def epoch(self) -> int:
        """Number of complete passes through the loader."""
        return self._position.epoch


class ResumableLoaders:
    """All loaders of a run, in the order in which they were made."""

    def __init__(self) -> None:
        self.positions: list[Position] = []
        self._saved: list[dict[str, Any]] = []

    def add(self, position: Position) -> ResumableLoader[Any]:
        """Add a loader, at its saved position if there is one."""
        self.positions.append(position)
        number = len(self.positions) - 1
        if number < len(self._saved):
            with rng.unchanged():
                position.load(self._saved[number])
        return ResumableLoader(position)

    def capture(self) -> list[dict[str, Any]]:
        """Positions for a checkpoint; loaders not made yet keep their saved position."""
        return [one.state() for one in self.positions] + self._saved[len(self.positions) :]

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Restore the positions from a checkpoint.

        Raises:
            StateMismatch: If there are now more loaders than were saved.
        """
        if len(saved) < len(self.positions):
            raise StateMismatch(
                f"run.loader: the checkpoint has {len(saved)} loaders, and the script has"
                f" {len(self.positions)}. Call run.loader above the loop, for the same loaders in"
                " the same order"
            )
        self._saved = saved
        for position, state in zip(self.positions, saved, strict=False):
            with rng.unchanged():
                position.load(state)

    def close(self) -> None:
        """Close the iterators and their workers."""
        for position in self.positions:
            position.close()
