"""The iterators of `run.epochs` and `run.batches`, from the saved epoch and batch.

    before    code before the pass        boundary: this state is saved until the pass begins
    pass      a boundary before each step, and after the last
    after     code after the pass         the state at the end of the pass is held, and saved if
                                          a stop comes

A resumed job runs the code before a pass again, with the random state and the `run.state` of the
epoch's start. When the pass begins, everything is restored from the checkpoint again, so that the
code before the pass takes effect only once.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from forge.data import loaders
from forge.data.position import Position
from forge.errors import ForgeError
from forge.process import sections
from forge.state.run_state import RunState
from forge.training import misuse
from forge.training.boundary import Boundary
from forge.training.loop.epoch_start import EpochStart
from forge.training.loop.loop_state import EpochPhase, EpochPosition
from forge.training.loop.steps import Steps, close
from forge.training.parts import Parts


class Epochs:
    """The loop over `run.epochs`, and the pass of the current epoch."""

    def __init__(self, parts: Parts, own: RunState, boundary: Boundary, steps: Steps) -> None:
        self._loops = parts.loops
        self._start = EpochStart(parts.loops, own)
        self._boundary = boundary
        self._shutdown = parts.shutdown
        self._stops = parts.stops
        self._steps = steps
        self._metrics = parts.directory.metrics
        self._last: weakref.ref[Generator[int, None, None]] | None = None
        self._pass: weakref.ref[Generator[tuple[int, Any], None, None]] | None = None
        self._is_pass_due = False
        self._may_stop = True
        """Whether the end of the pass can be saved: the code after it has not begun."""
        self._older: list[weakref.ref[Any]] = []
        """The iterables at the start of the first epoch of a resumed job. If the loader is among
        them, its state is restored; a loader that each epoch makes itself is not."""
        self._kept: BaseException | None = None
        """An error when the pass was left by `break`; raised at the end of the epoch."""
        self._is_resumed = False
        """Whether the pass of this epoch begins at the batch where the checkpoint was saved."""

    # -- epochs --------------------------------------------------------------------------------

    def iterate(self, count: int) -> Iterator[int]:
        """See `Run.epochs`."""
        if self._loops.positions:
            raise ForgeError(misuse.EPOCHS_AFTER_A_LOOP)
        loop = self._epochs(count)
        self._last = weakref.ref(loop)
        return loop

    def close(self) -> None:
        """Close iterators that a script still references after a break."""
        self._close_pass()
        close(self._last)
        if self._kept is not None:
            raise self._kept

    def _close_pass(self) -> None:
        """Close a pass whose iterator something (a progress bar) still references after a break."""
        self._may_stop = False  # the code after the pass has possibly run, and would run twice
        close(self._pass)
        self._may_stop = True

    def _epochs(self, count: int) -> Generator[int, None, None]:
        loops = self._loops
        now = loops.enter_epochs()
        if self._boundary.lengths is not None:
            self._boundary.lengths.check_count("epochs", count)
        has_finished = loops.is_complete and count <= now.planned
        if has_finished or (loops.is_over(math.inf) and not loops.due):
            self._boundary.pass_over()
            return
        now.planned = count
        loops.begin_loop(math.inf)
        self._is_resumed = now.phase is not EpochPhase.before
        while self._begin_epoch(count):
            try:
                yield self._epoch.epoch
            except GeneratorExit:
                self._close_pass()
                self._boundary.let_go(is_left=True)
                self._boundary.leave_loop()
                raise
            self._end_epoch()
        if loops.loaded is not None:
            loops.restore_random()
        else:
            self._boundary.save_anew()
        has_ended = bool(loops.due) or loops.is_over(math.inf)
        self._boundary.pass_through(None, loops.step, has_ended=has_ended)
        self._boundary.end_loop()

    @property
    def _epoch(self) -> EpochPosition:
        assert self._loops.epochs is not None
        return self._loops.epochs  # replaced when a checkpoint is loaded

    def _begin_epoch(self, count: int) -> bool:
        """Whether there is another epoch."""
        if self._loops.is_over(math.inf) or self._epoch.epoch >= count:
            return False
        if self._is_resumed:
            self._start.go_back()
        else:
            if self._loops.loaded is not None:
                self._older = _iterables()
                self._loops.restore_random()
            if self._boundary.pass_through(None, math.inf):
                return False
            sections.current().begin_epoch()
            self._start.note()
        self._metrics.on_step(self._loops.step)
        self._is_pass_due = True
        return True

    def _end_epoch(self) -> None:
        now = self._epoch
        self._close_pass()
        with self._shutdown.giving_up():
            if self._kept is not None:
                raise self._kept
        self._boundary.check_left()
        self._boundary.let_go()
        if self._is_pass_due:
            raise ForgeError(misuse.epoch_without_pass(now.epoch))
        self._is_resumed = False
        now.epoch, now.phase, now.values = now.epoch + 1, EpochPhase.before, None

    # -- the pass of an epoch ------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """See `Run.batches`."""
        one = self._batches(loader)
        self._pass = weakref.ref(one)
        return one

    def _batches(self, loader: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
        if not self._is_pass_due:
            raise ForgeError(misuse.BATCHES_WITHOUT_EPOCH)
        self._is_pass_due = False
        position = self._loops.open_loader(loader, self._epoch.epoch, sets_epoch=False)
        self._enter(position, loader)
        lengths = self._boundary.lengths
        if lengths is not None and self._epoch.phase is EpochPhase.within:
            lengths.compare(loaders.num_batches(loader))
        while self._epoch.phase is EpochPhase.within:
            if self._boundary.pass_through(position, math.inf):
                break
            batch = self._steps.take(position.next_of_pass)
            if position.is_over:
                if lengths is not None:
                    lengths.ended(position.taken)
                break
            try:
                yield from self._steps.step(position, batch)
            except GeneratorExit:
                position.end_pass(is_left=True)
                self._boundary.note_left()
                try:
                    self._end_pass(is_left=True)
                except BaseException as error:  # noqa: BLE001 - nobody hears what is raised here
                    self._kept = error
                raise
        self._end_pass()

    def _enter(self, position: Position, loader: Iterable[Any]) -> None:
        """Go to the saved batch, if the checkpoint was saved in this pass."""
        loops = self._loops
        if self._is_resumed:
            assert loops.saved_position is not None
            # First: a sampler can depend on values that the code before the pass read in run.state.
            self._steps.go_to(position, loops.saved_position)
            self._boundary.put_back()
            loops.restore_random()
            loops.positions[-1] = position
            loops.forget_loaded()
            return
        before, older = loops.positions[-1], self._older
        if isinstance(before, Position):
            position.follow(before)
        elif before is not None and any(one() is loader for one in older):
            position.load_finished(before)  # not if each epoch makes its own loader
            position.name_changes(before)
        self._older = []
        loops.begin_pass(position)
        self._boundary.begin_pass()

    def _end_pass(self, *, is_left: bool = False) -> None:
        now = self._epoch
        # A break and an error look the same here. After a stop request, the stop can be the cause;
        # with several ranks, all of them have left the pass by now.
        is_caused = is_left and self._boundary.is_alone and self._stops.is_stopping
        may_stop = self._may_stop and not is_caused
        is_first = now.phase is EpochPhase.within
        self._boundary.end_pass(
            now.epoch + 1, is_first=is_first, may_stop=may_stop, is_left=is_left
        )


def _iterables() -> list[weakref.ref[Any]]:
    """All objects that can be a loader with a state, which they do not keep alive."""
    kinds: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in kinds:
            kinds[kind] = hasattr(kind, "__iter__") and kind.__weakrefoffset__ != 0
        if kinds[kind]:
            found.append(weakref.ref(one))
    return found
