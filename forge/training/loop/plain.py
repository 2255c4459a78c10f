"""The loops of a disabled Run: the same batches, steps and evaluations, but no saves."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from forge.data.position import Position
from forge.errors import ForgeError
from forge.training import misuse
from forge.training.loop.evaluations import Evaluations
from forge.training.loop.pushed import Start
from forge.training.loop.resumable_loader import ResumableLoader
from forge.training.loop.steps import again, close
from forge.training.nan.update import Updater


class PlainLoops:
    """`Run.steps`, `Run.epochs` and `Run.batches` with `resilience.enabled=false`."""

    def __init__(self, updater: Updater, evaluations: Evaluations) -> None:
        self._updater = updater
        self._evaluations = evaluations
        self.step = 0
        self.epoch = 0
        self.is_finished = False
        """Whether `run.finish` was called."""
        self._has_begun = self._has_epochs = self._is_pass_due = False
        self._pass: weakref.ref[Generator[tuple[int, Any], None, None]] | None = None
        self.is_in_step = self.is_in_epochs = False
        self._position: Position | None = None

    @property
    def batch(self) -> int:
        """Batches done in this pass."""
        return self._position.taken - self.is_in_step if self._position is not None else 0

    def loader(self, loader: Iterable[Any]) -> ResumableLoader[Any]:
        """See `Run.loader`."""
        return ResumableLoader(Position(loader))

    def steps(self, n: float, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        if self._has_epochs:
            raise ForgeError(misuse.STEPS_AND_EPOCHS)
        if self._has_begun and self.step >= n:
            raise ForgeError(again(n, self.step))
        self._has_begun = True
        self._position = position = Position(loader) if loader is not None else None
        self.is_finished = False
        while self.step < n and not self.is_finished:
            batch = position.next() if position is not None else None
            self.epoch = position.epoch if position is not None else 0
            yield from self._one((self.step, batch) if position is not None else self.step)
            is_end = self.step >= n or self.is_finished
            self._run_due(is_end=is_end)
            if self.is_finished and not is_end:  # by a function of run.every
                self._run_due(is_end=True, is_rest=True)

    def epochs(self, n: int) -> Iterator[int]:
        """See `Run.epochs`."""
        if self._has_begun:
            raise ForgeError(misuse.EPOCHS_AFTER_A_LOOP)
        self.is_finished, self.is_in_epochs = False, True
        self._has_begun = self._has_epochs = True
        try:
            while self.epoch < n and not self.is_finished:
                self._position, self._is_pass_due = None, True
                yield self.epoch
                close(self._pass)
                if self._is_pass_due:
                    raise ForgeError(misuse.epoch_without_pass(self.epoch))
                self._evaluations.is_after_pass = False
                self.epoch += 1
        finally:
            self.is_in_epochs = self._is_pass_due = self._evaluations.is_after_pass = False
        self._run_due(is_end=True, is_rest=True)

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """See `Run.batches`."""
        one = self._batches(loader)
        self._pass = weakref.ref(one)
        return one

    def _batches(self, loader: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
        if not self._is_pass_due:
            raise ForgeError(misuse.BATCHES_WITHOUT_EPOCH)
        self._is_pass_due = False
        self._position = position = Position(loader, self.epoch)
        asked = self.step
        try:
            while not self.is_finished:
                batch = position.next_of_pass()
                if position.is_over:
                    break
                yield from self._one((self.step, batch))
                self._run_due(is_end=False)
                asked = self.step
        finally:
            is_new = self.step > asked  # after a break, functions due at this step have not run
            due = self._evaluations.due_after_pass(self.epoch + 1, self.step, is_new=is_new)
            self._evaluations.run(due, self.step)
            self._evaluations.is_after_pass = True

    def begin(self) -> Start:
        """See `Run.begin`."""
        if self._has_begun:
            raise ForgeError(misuse.BEGIN_AFTER_A_LOOP)
        self._has_begun = self.is_in_step = True
        return Start(self.step, self.epoch, is_resumed=False, is_finished=False)

    def pass_boundary(self, step: int, epoch: int, taken: object) -> bool:
        """See `Run.boundary`."""
        misuse.check_boundary(step, self.step, is_open=self.is_in_step)
        self.is_in_step = False
        self._updater.settle()
        self.step, self.epoch = step, epoch
        self._run_due(is_end=self.is_finished)
        self.is_in_step = not self.is_finished
        self._updater.begin(step)
        return self.is_finished

    def end_loop(self, reason: str) -> None:
        """See `Run.end_loop`."""
        if self.is_in_step:
            self.is_in_step = False
            self._run_due(is_end=True, is_rest=True)

    def _one(self, value: Any) -> Generator[Any, None, None]:
        """One step."""
        self._updater.begin(self.step)
        has_counted = self.is_in_step = True
        try:
            yield value
        except GeneratorExit:  # break: the step counts if it changed anything
            has_counted = self._updater.has_updated
            raise
        finally:
            self._updater.settle()
            self.is_in_step = False
            self.step += has_counted

    def _run_due(self, *, is_end: bool, is_rest: bool = False) -> None:
        due = self._evaluations.due(self.step, is_end=is_end, is_rest=is_rest)
        self._evaluations.run(due, self.step)
