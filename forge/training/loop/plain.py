"""The loops of a disabled Run: the same batches, steps and evaluations, but no saves."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from forge import messages
from forge.config.schema import NanConfig
from forge.data.position import Position
from forge.errors import ForgeError
from forge.state.registry import StateRegistry
from forge.training import misuse
from forge.training.loop import loop_state
from forge.training.loop.evaluations import Evaluations
from forge.training.loop.loop_progress import LoopProgress, ResumableLoader
from forge.training.loop.loop_state import EpochPhase
from forge.training.loop.pushed import Start
from forge.training.loop.steps import again, close, counted
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater


class PlainLoops:
    """The interface of `Attempt`, with `resilience.enabled=false`."""

    resumed_from = None
    is_stopping = False

    def __init__(self, live: StateRegistry, evaluations: Evaluations) -> None:
        self.updater = Updater(live, NanPolicy(NanConfig()), is_enabled=False)
        self.loops = LoopProgress()
        self._evaluations = evaluations
        self._is_finished = False
        """Whether `run.finish` was called."""
        self._is_pass_due = False
        self._pass: weakref.ref[Generator[tuple[int, Any], None, None]] | None = None
        self._after = ExitStack()
        self._pid = os.getpid()

    # -- loops ---------------------------------------------------------------------------------

    def loader(self, loader: Iterable[Any]) -> ResumableLoader[Any]:
        """A loader of `run.steps` after the first; see `Run.steps`."""
        return ResumableLoader(Position(loader))

    def steps(self, n: float, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        loops = self.loops
        if loops.epochs is not None:
            raise ForgeError(misuse.STEPS_AND_EPOCHS)
        if loops.positions and loops.step >= n:
            raise ForgeError(again(n, loops.step))
        loops.enter_steps()
        loops.positions[-1] = position = Position(loader) if loader is not None else None
        self._is_finished = False
        while loops.step < n and not self._is_finished:
            batch = position.next() if position is not None else None
            yield from self._one((loops.step, batch) if position is not None else loops.step)
            is_end = loops.step >= n or self._is_finished
            self._run_due(is_end=is_end)
            if self._is_finished and not is_end:  # by a function of run.every
                self._run_due(is_end=True, is_rest=True)

    def epochs(self, n: int) -> Iterator[int]:
        """See `Run.epochs`."""
        if self.loops.positions:
            raise ForgeError(misuse.EPOCHS_AFTER_A_LOOP)
        self._is_finished, now = False, self.loops.enter_epochs()
        try:
            while now.epoch < n and not self._is_finished:
                now.phase, self._is_pass_due = EpochPhase.before, True
                yield now.epoch
                close(self._pass)
                if self._is_pass_due:
                    raise ForgeError(misuse.epoch_without_pass(now.epoch))
                self._after.close()
                now.epoch += 1
        finally:
            self._is_pass_due = False
            self._after.close()
            self.loops.end_loop()
        self._run_due(is_end=True, is_rest=True)

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """See `Run.batches`."""
        one = self._batches(loader)
        self._pass = weakref.ref(one)
        return one

    def _batches(self, loader: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
        loops, now = self.loops, self.loops.epochs
        if not self._is_pass_due or now is None:
            raise ForgeError(misuse.BATCHES_WITHOUT_EPOCH)
        self._is_pass_due, position = (
            False,
            Position(loader, now.epoch, sets_epoch=False),
        )
        loops.begin_pass(position)
        evaluated = loops.step
        try:
            while not self._is_finished:
                batch = position.next_of_pass()
                if position.is_over:
                    break
                yield from self._one((loops.step, batch))
                self._run_due(is_end=False)
                evaluated = loops.step
        finally:
            is_new = loops.step > evaluated  # after a break, functions due here have not run
            due = self._evaluations.due_after_pass(now.epoch + 1, loops.step, is_new=is_new)
            self._evaluations.run(due, loops.step)
            self._after.enter_context(self._evaluations.after_pass())

    def begin(self) -> Start:
        """See `Run.begin`."""
        if self.loops.positions:
            raise ForgeError(misuse.BEGIN_AFTER_A_LOOP)
        self.loops.enter_pushed()
        self.loops.begin_step()
        return Start(self.loops.step, epoch=0, is_resumed=False, is_finished=False)

    def pass_boundary(self, step: int, epoch: int, taken: object) -> bool:
        """See `Run.boundary`."""
        loops = self.loops
        misuse.check_boundary(step, loops.step, is_open=loops.is_in_step)
        self.updater.settle()
        loops.end_step(step)
        loops.positions[-1] = loop_state.pushed(epoch)
        self._run_due(is_end=self._is_finished)
        if not self._is_finished:
            loops.begin_step()
        self.updater.on_step(step)
        return self._is_finished

    def end_loop(self, reason: str) -> None:
        """See `Run.end_loop`."""
        if self.loops.is_in_step:
            self.loops.end_step(None)
            self._run_due(is_end=True, is_rest=True)

    def _one(self, value: Any) -> Iterator[Any]:
        """One step."""
        self.updater.on_step(self.loops.step)
        return counted(self.loops, self.updater, value)

    def _run_due(self, *, is_end: bool, is_rest: bool = False) -> None:
        step, stride = self.loops.step, self.loops.stride
        due = self._evaluations.due(step, stride, is_end=is_end, is_rest=is_rest)
        self._evaluations.run(due, step)

    # -- calls between two steps ---------------------------------------------------------------

    def log(self, values: dict[str, Any]) -> None:
        """See `Run.log`; there is no ledger."""

    def log_to(self, loggers: Iterable[Any]) -> None:
        """See `Run.log_to`; there is no ledger."""
        messages.warn(
            "run.log_to: the loggers get nothing, since `resilience.enabled=false` switches off"
            " what `run.log` records"
        )

    def save(self) -> None:
        """See `Run.save`; nothing is saved."""

    def finish(self, reason: str) -> None:
        """See `Run.finish`."""
        if not (self.loops.is_in_step or self._evaluations.is_entered):
            raise ForgeError(misuse.FINISH_OUTSIDE_A_LOOP)
        self._is_finished = True

    def check_stop(self) -> None:
        """See `Run.check_stop`; there is no stop, but a call in another place is an error."""
        self._evaluations.may_poll(self._pid)

    def on_stop(self, callback: Any, timeout_s: float) -> None:
        """See `Run.on_stop`; forge handles no signal."""

    def close(self, error: BaseException | None) -> None:
        """Leave the `with` block."""
