"""The progress of a run: its loops, the steps done, and each position in the data.

`capture` makes the `LoopState` of a checkpoint, and `load` takes it over. `loaded` has the values
that a resumed loop needs when it begins. The second and later loaders of `run.steps` have positions
that no loop resets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from forge import messages
from forge.data import loaders
from forge.data.parts import FixedParts
from forge.data.position import Position
from forge.errors import ConfigError, StateMismatch
from forge.process import sections
from forge.state import rng
from forge.training.loop import loop_state
from forge.training.loop.loop_state import EpochPhase, EpochPosition, LoopState
from forge.training.start import preflight


class LoopProgress:
    """The progress of the loops of one attempt.

    Args:
        note: Writes an event to the ledger.
    """

    def __init__(self, note: Callable[..., None] = lambda kind, **values: None) -> None:
        self._note = note
        self.step = 0
        self.stride = 1
        """Steps between the last two boundaries; more than 1 only in a loop of `run.boundary`."""
        self.planned: int | None = None
        self.due: list[str] | None = None
        self.finished_by = ""
        self.epochs: EpochPosition | None = None
        self.positions: list[Position | dict[str, Any] | None] = []
        """The position of each loop; a loop that was over at its start keeps its loaded one."""
        self.loaders = ResumableLoaders()
        self.loaded: LoopState | None = None
        """The checkpoint's state, until the loop begins in which it was saved."""
        self.is_complete = False
        """Whether a finished run was loaded and no loop of it has begun again."""
        self.is_in_step = False
        self.is_between = False
        """Whether the user's code runs outside a loop, after one."""
        self.fixed = FixedParts()
        """Fixed properties of the loaders in use."""
        self._ended: list[dict[str, Any]] = []
        self._broken_off: set[int] = set()
        self._is_longer = False
        """Whether a skipped loop now has more steps to do than it was planned with."""
        self._said: set[str] = set()

    # -- now -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of `run.epochs`, or else of the loader being read; 0 without a loader."""
        if self.epochs is not None:
            return self.epochs.epoch
        position = self.positions[-1] if self.positions else None
        if isinstance(position, dict) and loop_state.is_pushed(position):
            return int(position["epoch"])
        return position.epoch if isinstance(position, Position) else 0

    @property
    def batch(self) -> int:
        """Batches done in this pass through the loader."""
        position = self.positions[-1] if self.positions else None
        if self.epochs is not None and self.epochs.phase is EpochPhase.before:
            return 0
        return position.taken - self.is_in_step if isinstance(position, Position) else 0

    @property
    def is_in_epochs(self) -> bool:
        """Whether the user's code runs inside the loop over `run.epochs`."""
        has_begun = self.epochs is not None and bool(self.positions)
        return has_begun and not self.is_between

    @property
    def next_boundary(self) -> int:
        """Steps done at the next boundary, or at the current boundary."""
        return self.step + self.is_in_step

    @property
    def number(self) -> int:
        """Number of the loop that began last, from 0."""
        return len(self.positions) - 1

    # -- the loops -----------------------------------------------------------------------------

    def open_loader(
        self, loader: Iterable[Any], epoch: int = 0, *, sets_epoch: bool = True
    ) -> Position:
        """Start reading a loader."""
        position = Position(loader, epoch, sets_epoch=sets_epoch)
        self.watch(loader)
        return position

    def watch(self, loader: Any) -> None:
        """Refuse later changes of a loader; name once what is not known to resume exactly."""
        self.fixed.watch(loader)
        for doubt in loaders.doubts(loader):
            if doubt not in self._said:
                self._said.add(doubt)
                messages.warn(f"Not known to resume exactly: {doubt}")
                self._note("inexact", text=doubt)

    def enter_steps(self) -> None:
        """Begin a loop over `run.steps`."""
        self.positions.append(None)
        if loop_state.is_pushed(self.saved_position):
            raise self._of_another_kind("a loop over run.steps")

    def enter_pushed(self) -> None:
        """Begin a loop that forge does not own, in the epoch of its checkpoint if there is one."""
        self.positions.append(None)
        saved = self.saved_position
        if self.epochs is not None or (self.is_known and not loop_state.is_pushed(saved)):
            raise self._of_another_kind("a loop with run.boundary")
        self.positions[-1] = saved or loop_state.pushed(epoch=0)

    def enter_epochs(self) -> EpochPosition:
        """Begin the loop over `run.epochs`, at its saved position if there is one."""
        if self.epochs is None and self.loaded is not None and self.loaded.positions:
            raise self._of_another_kind("a loop over run.epochs")
        self.positions.append(None)
        self.positions[-1] = self.saved_position
        self.epochs = self.epochs or EpochPosition()
        return self.epochs

    def begin_loop(self, planned: float) -> None:
        """The loop has steps left to do, or at least functions of `run.every`.

        Args:
            planned: Steps that it is to do.
        """
        self.planned = None if math.isinf(planned) else int(planned)
        if self.number not in self._broken_off:
            self.finished_by = ""
        self.is_complete = self.is_between = False

    def begin_pass(self, position: Position) -> None:
        """Begin the pass of an epoch."""
        assert self.epochs is not None
        self.positions[-1], self.epochs.phase = position, EpochPhase.within

    def begin_step(self) -> None:
        """A step begins."""
        self.is_in_step = True

    def end_step(self, step: int | None) -> None:
        """A step has ended.

        Args:
            step: Steps done now; None: the step does not count.
        """
        self.is_in_step = False
        if step is not None:
            self.stride, self.step, self.due = max(step - self.step, 1), step, None

    def expect(self, due: list[str]) -> None:
        """These functions of `run.every` are still to run at this boundary."""
        self.due = due

    def is_over(self, n: float) -> bool:
        """Whether the current loop has no steps left to do."""
        return self.step >= n or self.number in self._broken_off

    def has_finished(self, n: float) -> bool:
        """Whether the loaded run finished with at least `n` steps planned."""
        return self.is_complete and self.planned is not None and n <= self.planned

    def break_off(self, because: str = "") -> None:
        """End the loop before its `n`; a later start does not continue it either."""
        self.finished_by = because or self.finished_by
        self._broken_off.add(self.number)

    def pass_over(self, n: float = 0) -> None:
        """Skip a loop that had ended at the save; restores the random state of its end.

        Args:
            n: Steps that the loop is to do now.
        """
        self._is_longer = self._is_longer or (self.planned is not None and n > self.planned)
        self.positions[-1] = self.saved_position
        if self.loaded is not None:
            ended = self.loaded.ended
            rng.restore(ended[self.number] if self.number < len(ended) else self.loaded.rng)
        self.end_loop()

    def end_loop(self) -> None:
        """The loop has ended: keep the random state for the code after it."""
        self.fixed.end_loop()
        self._ended.append(rng.capture())
        self.is_between = True
        sections.current().rest()

    @contextlib.contextmanager
    def not_between(self) -> Iterator[None]:
        """In the block, forge itself runs, and no interruption can save the state between loops."""
        was_between, self.is_between = self.is_between, False
        yield
        self.is_between = was_between

    def close(self) -> None:
        """Close the iterators of the loaders."""
        self.loaders.close()
        for position in self.positions:
            if isinstance(position, Position):
                position.close()

    # -- a checkpoint --------------------------------------------------------------------------

    def capture(self) -> LoopState:
        """The state for a checkpoint."""
        return LoopState(
            step=self.step,
            planned=self.planned,
            broken_off=sorted(self._broken_off),
            positions=[p.state() if isinstance(p, Position) else p for p in self.positions],
            ended=self._ended,
            loaders=self.loaders.capture(),
            due=self.due,
            epochs=self.epochs and replace(self.epochs),
            finished_by=self.finished_by,
            rng=rng.capture(),
        )

    def load(self, state: LoopState) -> None:
        """Restore the progress from a checkpoint."""
        self.step, self.planned, self.due = state.step, state.planned, state.due
        self.stride = 1
        self._broken_off = set(state.broken_off)
        self.finished_by, self.epochs, self.loaded = state.finished_by, state.epochs, state
        self.loaders.load(state.loaders)

    def restore_random(self) -> None:
        """Restore the loaded random state, if there is one."""
        if self.loaded is not None:
            rng.restore(self.loaded.rng)

    def forget_loaded(self) -> None:
        """The loop in which the checkpoint was saved has begun."""
        self.loaded = None

    @property
    def saved_position(self) -> dict[str, Any] | None:
        """The loaded position of the loop that began last, if there is one."""
        if self.loaded is None or not self.is_known:
            return None
        return self.loaded.positions[self.number]

    @property
    def is_known(self) -> bool:
        """Whether the current loop had already begun when the checkpoint was saved."""
        return self.loaded is not None and self.number < len(self.loaded.positions)

    @property
    def is_resumed(self) -> bool:
        """Whether the checkpoint was saved inside the current loop."""
        return self.loaded is not None and len(self.loaded.positions) == len(self.positions)

    def is_in_pass_of(self, state: LoopState) -> bool:
        """Whether a captured state belongs to the current pass, or to the same loop."""
        if self.positions and loop_state.is_pushed(self.positions[-1]):
            return False  # no loop of somebody else's can go back
        if self.epochs is None:
            return True
        saved = state.epochs
        is_within = saved is not None and saved.phase is EpochPhase.within
        return is_within and saved is not None and saved.epoch == self.epochs.epoch

    @property
    def missing(self) -> str:
        """The error of a script that ends without reaching its saved loop; empty: no error."""
        saved = len(self.loaded.positions) if self.loaded is not None else 0
        if len(self.positions) >= saved or (self.is_complete and not self._is_longer):
            return ""
        name, n = ("epochs", self.epochs.planned) if self.epochs else ("steps", self.planned)
        after = f"after loop {len(self.positions)}" if self.positions else "before its first loop"
        return (
            f"the training is not finished: the checkpoint was saved in loop {saved} of this Run"
            f" (run.{name}({n})), but the script left the `with` block {after}. If the script"
            " begins that loop only after it caught an error, a resumed job never reaches it: catch"
            " the error inside the step, or keep what it changed in run.state, and loop `while"
            " run.step < n:`. To continue from this checkpoint, begin as many loops as the saved"
            " run"
        )

    def _of_another_kind(self, now: str) -> StateMismatch:
        """The error if the checkpoint was saved in a loop of another kind than this one."""
        assert self.loaded is not None
        saved = "a loop over run.epochs" if self.epochs is not None else "a loop over run.steps"
        saved = "a loop with run.boundary" if self.loaded.is_pushed else saved
        return StateMismatch(
            f"data: the checkpoint has a position in {saved}, but this is {now}. A resumed training"
            " cannot switch between the two: keep that loop, or start in a new directory"
        )


_Batch = TypeVar("_Batch")


class ResumableLoader(Iterator[_Batch]):
    """Returns batches with `next()`; starts a new pass when the loader ends."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def __next__(self) -> _Batch:
        try:
            batch: _Batch = self._position.next()
        except ConfigError:
            with preflight.exits():
                raise
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
                f"run.steps: the checkpoint has {len(saved)} loaders after the first, and the"
                f" script has {len(self.positions)}. Give run.steps the same loaders in the same"
                " order"
            )
        self._saved = saved
        for position, state in zip(self.positions, saved, strict=False):
            with rng.unchanged():
                position.load(state)

    def close(self) -> None:
        """Close the iterators and their workers."""
        for position in self.positions:
            position.close()
