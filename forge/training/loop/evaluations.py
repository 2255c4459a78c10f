"""Functions of `run.every`: what runs between two steps, an evaluation above all."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from forge import messages
from forge.errors import ForgeError
from forge.training.loop import shortened


@dataclass(frozen=True)
class _Evaluation:
    name: str
    function: Callable[[int], object]
    steps: int | None
    at_end: bool
    epochs: int | None = None

    def is_due(self, step: int, *, is_end: bool) -> bool:
        return (self.at_end and is_end) or (self.steps is not None and step % self.steps == 0)


class Evaluations:
    """The functions that were registered, in order."""

    def __init__(self) -> None:
        self._all: list[_Evaluation] = []
        self._last_s: dict[str, float] = {}
        self.is_running = False
        self.is_after_pass = False
        """Whether what follows the pass of an epoch is running: it may poll as well."""
        self.pid = os.getpid()

    def add(
        self,
        function: Callable[[int], object],
        steps: int | None,
        *,
        at_end: bool,
        epochs: int | None = None,
    ) -> None:
        """Run `function` every so many steps, so many passes, or at the end of the loop.

        Raises:
            ForgeError: Where that is never.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if steps is None and epochs is None and not at_end:
            raise ForgeError(
                f"run.every(None) of {name}: give a number of steps, epochs=, or at_end=True"
            )
        for key, number in (("", steps), ("epochs=", epochs)):
            is_number = isinstance(number, int) and not isinstance(number, bool) and number > 0
            if number is not None and not is_number:
                what = "epochs" if key else "steps"
                raise ForgeError(
                    f"run.every({key}{number!r}) of {name}: expected a positive number of {what}"
                )
        same = [one for one in self._all if one.name.partition(" ")[0] == name]
        name = f"{name} {len(same) + 1}" if same else name
        steps, epochs = shortened.every(steps), shortened.every_epochs(epochs)
        self._all.append(_Evaluation(name, function, steps, at_end, epochs))

    def due_after_pass(self, epoch: int, step: int, *, is_new: bool) -> list[str]:
        """The names of those that are due once so many passes are done.

        Args:
            is_new: Whether those that are due after so many steps are still to run.
        """
        by_steps = self.due(step, is_end=False)
        by_epochs = [one.name for one in self._all if one.epochs and epoch % one.epochs == 0]
        found = {*by_steps, *by_epochs} if is_new else {*by_epochs} - {*by_steps}
        return [one.name for one in self._all if one.name in found]

    def due(self, step: int, *, is_end: bool, is_rest: bool = False) -> list[str]:
        """The names of those that are due once so many steps are done; none before the first.

        Args:
            is_end: Whether the loop ends here.
            is_rest: Whether those that are due without that have run.
        """
        if not self._all:
            return []
        found = [one for one in self._all if step > 0 and one.is_due(step, is_end=is_end)]
        return [one.name for one in found if not (is_rest and one.is_due(step, is_end=False))]

    @property
    def is_entered(self) -> bool:
        """Whether one of them runs, or what follows a pass."""
        return self.is_running or self.is_after_pass

    def may_poll(self) -> bool:
        """Whether it is the main thread that asks, in one of the functions.

        Raises:
            ForgeError: Where none of them is running; never in a worker, a thread or a child.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != self.pid:
            return False
        if not self.is_entered:
            raise ForgeError(
                "run.check_stop() was called outside a function of run.every, where no stop can"
                " happen: move the evaluation into one (`@run.every(100)` above"
                " `def evaluate(step):`)."
                " Elsewhere a stop comes at the end of the step; `run.is_stopping` says when one is"
                " due."
            )
        return True

    def last_s(self, names: list[str]) -> float:
        """Seconds that these functions took when they last ran; infinite where one never did."""
        return sum(self._last_s.get(name, math.inf) for name in names)

    def run(self, names: list[str], step: int, before_each: Callable[[], object] = bool) -> None:
        """Call those of these names, and `before_each` of them that."""
        missing = set(names) - {one.name for one in self._all}
        if missing:
            messages.warn(
                f"At step {step} {', '.join(sorted(missing))} of run.every is still to run, but the"
                " script has no such function any more. Register them before run.steps()."
            )
        self.is_running = True
        try:
            for one in self._all:
                if one.name in names:
                    before_each()
                    began = time.monotonic()
                    one.function(step)
                    self._last_s[one.name] = time.monotonic() - began
        finally:
            self.is_running = False
