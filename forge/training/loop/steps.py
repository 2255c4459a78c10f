"""The iterator of `run.steps`: from the current step to `n`, with a boundary before each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from forge import messages
from forge.data.position import Position
from forge.errors import ConfigError, ForgeError
from forge.training import misuse
from forge.training.boundary import Boundary
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.update import Updater
from forge.training.parts import Parts

NESTED = (
    "run.steps() was called inside a step of another run.steps. Give a second source of batches to"
    " the loop, `run.steps(n, loader, other)`; in an evaluation iterate over its loader directly,"
    " in a function of run.every."
)


def again(n: float, step: int) -> str:
    """The error for a second loop that would train nothing, with the way to write it."""
    return (
        f"run.steps({n}) was called again after {step} steps were done: it would train nothing,"
        " because the first argument counts the steps of the whole run. Either have one loop,"
        " `for step, batch in run.steps(epochs * len(loader), loader):`, or loop over epochs:"
        " `for epoch in run.epochs(epochs):` and in it `for step, batch in run.batches(loader):`."
    )


_EPOCHS = 3
"""Loops over one loader, each with a larger `n`, that look like a loop over epochs."""


def close(one: weakref.ref[Generator[Any, None, None]] | None) -> None:
    """End a loop that was left by `break`, if the script still references its iterator."""
    loop = one() if one is not None else None
    if loop is not None:
        loop.close()


def counted(loops: LoopProgress, updater: Updater, value: Any) -> Generator[Any, None, None]:
    """Yield the value of a step, which counts when it ends."""
    loops.begin_step()
    has_counted = True
    try:
        yield value
    except GeneratorExit:  # break: the step counts if it changed anything
        has_counted = updater.has_updated
        raise
    finally:
        updater.settle()
        loops.end_step(loops.step + 1 if has_counted else None)


class Steps:
    """The loops of one attempt, one after the other."""

    def __init__(self, parts: Parts, boundary: Boundary) -> None:
        self._loops = parts.loops
        self._boundary = boundary
        self._shutdown = parts.shutdown
        self._updater = parts.updater
        self._watchers = parts.watchers
        self._last: weakref.ref[Generator[Any, None, None]] | None = None
        self._repeated: tuple[Any, float, int] = (None, 0, 0)
        """The last loop's loader and `n`, and the number of loops in a row over that loader."""

    def iterate(self, n: float, loader: Iterable[Any] | None) -> Iterator[Any]:
        """See `Run.steps`."""
        if self._loops.epochs is not None:
            raise ForgeError(misuse.STEPS_AND_EPOCHS)
        self._look_for_epochs(n, loader)
        loop = self._loop(n, loader)
        # Weak: after a break nothing else references the iterator, so it ends immediately.
        self._last = weakref.ref(loop)
        return loop

    def close(self) -> None:
        """End the loop after a break, if the script still references its iterator."""
        close(self._last)

    def _look_for_epochs(self, n: float, loader: Iterable[Any] | None) -> None:
        before, last, count = self._repeated
        is_repeated = loader is not None and loader is before and n > last
        self._repeated = loader, n, count + 1 if is_repeated else 1
        if is_repeated and count + 1 == _EPOCHS:
            messages.warn(
                f"run.steps was called {_EPOCHS} times with the same loader, as in a loop over"
                " epochs. A resumed job runs the code between these calls again, so a schedule or a"
                " best value that is updated there is updated twice. Write `for epoch in"
                " run.epochs(epochs):` and in it `for step, batch in run.batches(loader):`; code in"
                " the outer loop takes effect once per epoch, even after a resume."
            )

    def _loop(self, n: float, loader: Iterable[Any] | None) -> Generator[Any, None, None]:
        loops = self._loops
        loops.enter_steps()
        if self._boundary.lengths is not None:
            self._boundary.lengths.check_count("steps", n)
        if loops.number and loops.step >= n and not (loops.is_known or loops.is_complete):
            raise ForgeError(again(n, loops.step))
        saved, is_over = loops.saved_position, loops.is_over(n)
        if loops.number and loops.is_resumed:
            self._boundary.put_back()  # the code between two loops must take effect only once
        if loops.has_finished(n) or (is_over and not (loops.due and loops.is_resumed)):
            if loader is not None and saved is not None:
                Position(loader).load_finished(saved)
            self._boundary.pass_over(n)
            return
        loops.fixed.begin_loop()
        position = loops.open_loader(loader) if loader is not None else None
        loops.positions[-1] = position
        loops.begin_loop(n)
        if position is not None and saved is not None:
            self.go_to(position, saved)
        if loops.is_resumed:
            # Only now, since creating an iterator draws a random number. A later loop keeps the
            # random state that the code before it left.
            loops.restore_random()
        self._boundary.begin_loop()
        try:
            while not self._boundary.pass_through(position, loops.step if is_over else n):
                batch = self.take(position.next) if position is not None else None
                yield from self.step(position, batch)
        except (GeneratorExit, Exception):  # the script can catch an error, and begin another loop
            self._boundary.leave_loop()
            raise
        self._boundary.end_loop()

    def go_to(self, position: Position, state: dict[str, Any]) -> None:
        """Go to a saved position in the data; exits if the loader cannot go there."""
        with self._shutdown.giving_up():
            position.load(state)

    def take(self, following: Callable[[], Any]) -> Any:
        """The next batch; exits if no checkpoint could hold the state of its loader."""
        try:
            return following()
        except ConfigError as error:
            self._shutdown.give_up(error)

    def step(self, position: Position | None, batch: Any) -> Generator[Any, None, None]:
        """Yield one step of a loop; it counts when it ends."""
        loops = self._loops
        for tell in self._watchers.on_batch:
            tell(batch)
        value = (loops.step, batch) if position is not None else loops.step
        yield from counted(loops, self._updater, value)
