"""Functions of `run.every`, which run between two steps; mostly evaluations."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forge import messages
from forge.errors import ForgeError


@dataclass(frozen=True)
class _Evaluation:
    name: str
    function: Callable[[int], object]
    steps: int | None
    at_end: bool
    epochs: int | None = None

    def is_due(self, step: int, stride: int, *, is_end: bool) -> bool:
        return (self.at_end and is_end) or (self.steps is not None and step % self.steps < stride)


class Evaluations:
    """The registered functions, in order."""

    def __init__(self) -> None:
        self._all: list[_Evaluation] = []
        self._last_s: dict[str, float] = {}
        self.is_running = False
        self._is_after_pass = False
        self.is_in_step = False
        """Whether an evaluation inside a step is running; a stop waits for its end."""

    def add(
        self,
        function: Callable[[int], object],
        steps: int | None,
        *,
        at_end: bool,
        epochs: int | None = None,
    ) -> None:
        """Run `function` every `steps` steps, every `epochs` passes, or at the end of the loop.

        Raises:
            ForgeError: If the function would never run.
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
        self._all.append(_Evaluation(name, function, steps, at_end, epochs))

    def due_after_pass(self, epoch: int, step: int, *, is_new: bool) -> list[str]:
        """Names of the functions that are due after `epoch` passes.

        Args:
            is_new: Whether the functions due at this step have not run yet.
        """
        by_steps = self.due(step, is_end=False)
        by_epochs = [one.name for one in self._all if one.epochs and epoch % one.epochs == 0]
        found = {*by_steps, *by_epochs} if is_new else {*by_epochs} - {*by_steps}
        return [one.name for one in self._all if one.name in found]

    def due(self, step: int, stride: int = 1, *, is_end: bool, is_rest: bool = False) -> list[str]:
        """Names of the functions that are due after `step` steps; none before the first step.

        Args:
            step: Steps done.
            stride: Steps since the boundary before: a multiple that was passed counts too.
            is_end: Whether the loop ends here.
            is_rest: Whether the functions due at this step by number have already run.
        """
        if not self._all:
            return []
        found = [one for one in self._all if step > 0 and one.is_due(step, stride, is_end=is_end)]
        return [
            one.name for one in found if not (is_rest and one.is_due(step, stride, is_end=False))
        ]

    @contextmanager
    def after_pass(self) -> Iterator[None]:
        """The code after an epoch's pass runs in the block: it can call `check_stop` too."""
        self._is_after_pass = True
        try:
            yield
        finally:
            self._is_after_pass = False

    @property
    def is_entered(self) -> bool:
        """Whether one of the functions, or the code after a pass, is running."""
        return self.is_running or self._is_after_pass

    def may_poll(self, pid: int) -> bool:
        """Whether the caller is the main thread, inside one of the functions.

        Args:
            pid: The process that trains.
        Raises:
            ForgeError: If none of them is running; never in a data worker, a thread or a child.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != pid:
            return False
        if not (self.is_entered or self.is_in_step):
            raise ForgeError(
                "run.check_stop() works only in a function decorated with run.every, or after a"
                " pass of run.batches. Move the code that calls it into such a function"
                " (`@run.every(100)` above `def evaluate(step):`). In a step it is not needed: the"
                " run stops at the end of the step; `run.is_stopping` shows whether a stop is"
                " pending."
            )
        return True

    def last_s(self, names: list[str]) -> float:
        """Seconds that these functions took in their last run; infinite if one has not run yet."""
        return sum(self._last_s.get(name, math.inf) for name in names)

    def run(self, names: list[str], step: int, before_each: Callable[[], object] = bool) -> None:
        """Call the functions of these names, and `before_each` before each of them."""
        missing = set(names) - {one.name for one in self._all}
        if missing:
            messages.warn(
                f"At step {step} the run.every function {', '.join(sorted(missing))} is due, but"
                " the script no longer registers it. Register it before run.steps()."
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
