"""`forge.data.resumable`: saves the place of a loader, for loops that forge does not own.

saved inside a pass      the next iteration continues after the batches that were taken
saved between passes     the next iteration is the next pass
with `ahead`             the batches that were taken, but not trained on, are read again first,
                         each with the random state that it was read with
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from forge.data.position import Position
from forge.state import rng

_Batch = TypeVar("_Batch")


class Resumable(Generic[_Batch]):
    """A loader with `state_dict` and `load_state_dict`. See `forge.data.resumable`."""

    exact = True

    def __init__(self, loader: Iterable[_Batch], ahead: int = 0) -> None:
        self.loader = loader
        self.ahead = ahead
        """Batches that the loop can have taken, and not trained on, at a step boundary."""
        self.taken = 0
        """Batches taken from this loader, over all passes and attempts."""
        self.pending = 0
        """Batches taken that the loop has not trained on yet, as `run.boundary` found last."""
        self.has_left = False
        """Whether the loop has left a pass before its last batch, without `end_pass`."""
        self._epoch: int | None = None
        """The number of the next pass, if `set_epoch` has set it."""
        self._num_skipped = 0
        """Batches without which the next pass begins."""
        self._position: Position | None = None
        """The place in the current or last pass; None before the first."""
        self._is_closed = ahead == 0
        """Whether the loop knows that a pass is over; one that reads ahead learns it later."""
        self._before: deque[tuple[Position, dict[str, Any], dict[str, Any]]] = deque(maxlen=ahead)
        """The place (with a mark of the position) and the random state before the last batches."""
        self._saved: dict[str, Any] | None = None
        """A loaded state, until the next pass begins."""
        self._random_states: list[dict[str, Any]] = []
        """The random states of pending batches that were loaded, until they are read again."""
        self._is_later = False
        """Whether the current pass came after another one, which has started persistent workers."""
        self._is_begun = False
        """Whether `begin_pass` has begun the pass that the next iteration reads."""

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, and call `set_epoch` of the samplers with it.

        Without this call the passes are counted, and the samplers keep the epoch that they have.
        A pass that was saved before its end keeps its number.
        """
        self._epoch = epoch

    def skip(self, count: int) -> None:
        """Begin the next pass after its first `count` batches, which count as taken."""
        self._num_skipped = count

    def __iter__(self) -> Iterator[_Batch]:
        if not self._is_begun:
            self._next_pass()
        position, self._is_begun = self._position, False
        assert position is not None
        self._skip(position)
        # Another position: a place was loaded while a script reads this iterator.
        while not position.is_over and self._position is position:
            batch = self._next_batch(position) if self.ahead else position.next_of_pass()
            if position.is_over:
                return
            self.taken += 1
            yield batch

    def _next_batch(self, position: Position) -> Any:
        """The next batch; keeps the place and the random state before it."""
        place = self._place(position)
        if self._random_states:
            random_state = self._random_states.pop(0)
            with rng.unchanged():
                rng.restore(random_state)
                batch = position.next_of_pass()
        else:
            random_state = rng.capture()
            batch = position.next_of_pass()
        if not position.is_over:
            self._before.append((position, place, random_state))
        return batch

    def begin_pass(self) -> None:
        """Make the iterator of the next pass now, and not when its first batch is taken.

        A DataLoader draws a random number as its iterator is made, and its order later. Call it if
        the loop draws random numbers in between, so that they stay the same.
        """
        self._next_pass()
        self._is_begun = True
        assert self._position is not None
        self._skip(self._position)
        if not self._position.is_over:
            self._position.begin_pass()

    def _skip(self, position: Position) -> None:
        if self._num_skipped:
            position.begin_after(self._num_skipped)
            self.taken += self._num_skipped
            self._num_skipped = 0

    def _next_pass(self) -> None:
        before, saved = self._position, self._saved
        if saved is not None and saved["is_over"]:
            position = self._open(self._number_after(saved["position"]["epoch"]))
            position.load_finished(saved["position"])
            position.name_changes(saved["position"])
        elif saved is not None:
            position = self._open(saved["position"]["epoch"])
            self._random_states = list(saved.get("pending", ()))
            with rng.unchanged():
                position.load(saved["position"])
                if saved.get("is_later"):
                    position.load_finished(saved["position"])
            position.is_over = saved.get("is_read", False)
        elif before is not None:
            if not before.is_over:
                self.has_left = True
                before.end_pass(is_left=True)
            position = self._open(self._number_after(before.epoch))
            position.follow(before)
        else:
            position = self._open(self._number_after(-1))
        if saved is not None and not saved["is_over"]:
            self._is_later = saved.get("is_later", False)
        else:
            self._is_later = (before or saved) is not None
        self._position, self._saved = position, None
        self._is_closed, self._epoch = self.ahead == 0, None

    def _open(self, epoch: int) -> Position:
        return Position(self.loader, epoch, sets_epoch=self._epoch is not None)

    def _number_after(self, epoch: int) -> int:
        return epoch + 1 if self._epoch is None else self._epoch

    def end_pass(self, taken: int | None = None) -> None:
        """End the current pass before its last batch: the next iteration is the next pass.

        Call it after each `break`, and after a resume too if the loop does not continue the pass.
        With `ahead`, batches that the loop has not trained on are dropped, and do not count as
        taken. Call it then also if the loop leaves a pass after its last batch, without noticing
        the end.

        Args:
            taken: Number of batches trained on so far, as for `run.boundary`; by default as at the
                last boundary.
        """
        if self._saved is not None:
            self._saved |= {"is_over": True, "pending": []}
        elif self._position is not None and not self._position.is_over:
            self._position.end_pass(is_left=True)
        self.taken = self.taken - self.pending if taken is None else taken
        self._is_closed, self.pending, self._random_states = True, 0, []

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was trained on."""
        taken = self.taken - self.pending
        if self._saved is not None:
            return {"taken": taken, **self._saved}
        if self._position is None:
            return {"taken": taken, "position": None, "is_over": True}
        if not self.pending:
            position, place, states = self._position, self._place(self._position), []
        else:
            position, place, _ = self._before[-self.pending]
            states = [one for *_, one in self._before][-self.pending :]
        states += self._random_states
        place = {**place, "position": position.completed(place["position"])}
        return {"taken": taken, **place} | ({"pending": states} if states else {})

    def _place(self, position: Position) -> dict[str, Any]:
        mark = position.mark()
        place = {"position": mark, "is_over": position.is_over and self._is_closed}
        if position.is_over and not self._is_closed:
            place["is_read"] = True
        if self._is_later and mark["start"] is None and not position.is_over:
            place["is_later"] = True
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place: the next iteration starts there."""
        self.taken, self._position = state["taken"], None
        self._saved, self._is_begun = None, False
        if state["position"] is not None:
            self._saved = {key: one for key, one in state.items() if key != "taken"}
        self.has_left, self.pending, self._random_states = False, 0, []
