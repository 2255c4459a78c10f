"""`forge.data.resumable`: saves the place of a loader, for loops that forge does not own.

saved inside a pass      the next iteration continues after the batches that were taken
saved between passes     the next iteration is the next pass
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from forge.data.position import Position
from forge.state import rng

_Batch = TypeVar("_Batch")


class Resumable(Generic[_Batch]):
    """A loader with `state_dict` and `load_state_dict`. See `resumable`."""

    def __init__(self, loader: Iterable[_Batch]) -> None:
        self.loader = loader
        self.taken = 0
        """Batches taken from this loader, over all passes and attempts."""
        self.has_left = False
        """Whether the loop has left a pass before its last batch, without `end_pass`."""
        self._position: Position | None = None
        """The place in the current or last pass; None before the first."""
        self._saved: dict[str, Any] | None = None
        """A loaded state, until the next pass begins."""

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[_Batch]:
        position = self._next_pass()
        while True:
            batch = position.next_of_pass()
            if position.is_over:
                return
            self.taken += 1
            yield batch

    def _next_pass(self) -> Position:
        before, saved = self._position, self._saved
        if saved is not None and not saved["is_over"]:
            position = Position(self.loader, saved["position"]["epoch"])
            with rng.unchanged():
                position.load(saved["position"])
        elif saved is not None:
            position = Position(self.loader, saved["position"]["epoch"] + 1)
            position.load_finished(saved["position"])
            position.name_changes(saved["position"])
        elif before is not None:
            self.has_left = self.has_left or not before.is_over
            self.end_pass()
            position = Position(self.loader, before.epoch + 1)
            position.follow(before)
        else:
            position = Position(self.loader)
        self._position, self._saved = position, None
        return position

    def end_pass(self) -> None:
        """End the current pass before its last batch: the next iteration is the next pass.

        Call it after each `break`, and after a resume too if the loop does not continue the pass.
        """
        if self._saved is not None:
            self._saved["is_over"] = True
        elif self._position is not None and not self._position.is_over:
            self._position.end_pass(is_left=True)

    def check(self, name: str) -> None:
        """Check that the state of a loader with its own state_dict is its place in the data.

        Args:
            name: The name of the loader in messages.
        Raises:
            ConfigError: If its `state_dict` raises, or did not restore the place.
        """
        if self._position is not None and not self._position.is_over:
            self._position.check(name)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was taken."""
        if self._saved is not None:
            return {"taken": self.taken, **self._saved}
        if self._position is None:
            return {"taken": self.taken, "position": None, "is_over": True}
        return {
            "taken": self.taken,
            "position": self._position.state(),
            "is_over": self._position.is_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place: the next iteration starts there."""
        self.taken, self._position = state["taken"], None
        is_begun = state["position"] is not None
        self._saved = {key: state[key] for key in ("position", "is_over")} if is_begun else None
        self.has_left = False


def resumable(loader: Iterable[_Batch]) -> Resumable[_Batch]:
    """Wrap a loader so that its place in the data is saved, to the batch, in any loop.

    For a loop that forge does not own, such as a trainer's. Give it to `forge.Run` like a model;
    without a Run, save its `state_dict()`, and restore torch's random state when you load it.

    Example::

        loader = forge.data.resumable(DataLoader(dataset, shuffle=True))
        with forge.Run(policy, model=model, optimizer=optimizer, loader=loader) as run:
            trainer.fit(model, loader)  # calls run.boundary between two steps

    The loop must not read ahead: a batch that it has taken counts as trained on, and `run.boundary`
    refuses a loop that has trained on fewer.

    Args:
        loader: A DataLoader, StatefulDataLoader, or any iterable of batches.
    Returns:
        An iterable of the same batches, with `len()` if the loader has it. If it is resumed inside
        a pass, its first iteration yields what is left of that pass.
    """
    return Resumable(loader)
