"""A loop that forge does not own: it calls `run.boundary` between two of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forge import messages
from forge.data.pushed import Resumable
from forge.errors import ConfigError, ForgeError
from forge.training import misuse
from forge.training.boundary import Boundary
from forge.training.loop import loop_state
from forge.training.parts import Parts


class Start(NamedTuple):
    """The step at which a loop begins, and what is left to do."""

    step: int
    """Steps done by earlier attempts."""
    epoch: int
    """The epoch that was last given to `run.boundary`; 0 at first."""
    is_resumed: bool
    """Whether a checkpoint of this loop was loaded."""
    is_finished: bool
    """Whether this loop had ended: then there is nothing left to train."""


class PushedLoop:
    """The loop between `Run.begin` and `Run.end_loop`."""

    def __init__(self, parts: Parts, boundary: Boundary, objects: Mapping[str, Any]) -> None:
        self._loops = parts.loops
        self._boundary = boundary
        self._shutdown = parts.shutdown
        self._updater = parts.updater
        self._handler = parts.handler
        self._objects = objects
        self._loaders = {n: one for n, one in objects.items() if isinstance(one, Resumable)}
        self._is_open = False

    def begin(self) -> Start:
        """See `Run.begin`."""
        loops = self._loops
        if loops.positions:
            raise ForgeError(misuse.BEGIN_AFTER_A_LOOP)
        if replaced := self._handler.take_back():
            messages.say(
                f"Other code has replaced forge's handler of {', '.join(replaced)} since forge.Run"
                " was entered: run.begin installs it again"
            )
        if len(self._loaders) > 1:
            raise ForgeError(
                f"run.begin(): forge.Run has {len(self._loaders)} objects of forge.data.resumable"
                f" ({', '.join(self._loaders)}), but a loop that forge does not own can have only"
                " one. Join the loaders in one iterable with state_dict and load_state_dict, and"
                " give that to forge.data.resumable; or use run.steps(n, first, second)."
            )
        loops.enter_pushed()
        epoch, is_resumed = loops.epoch, loops.is_resumed
        if is_resumed:
            # Again: a trainer can have changed the objects since the block was entered.
            self._boundary.put_back()
            loops.restore_random()
        is_finished = loops.is_over(math.inf) or loops.is_complete
        start = Start(loops.step, epoch, is_resumed, is_finished)
        if is_finished:
            self._boundary.pass_over()
            return start
        for one in self._resumables():
            loops.watch(one.loader)
        loops.fixed.begin_loop()
        loops.begin_loop(math.inf)
        self._boundary.begin_loop()
        self._is_open = not self._boundary.pass_through(None, math.inf)
        if self._is_open:
            loops.begin_step()
        return start

    def _resumables(self) -> Iterator[Resumable[Any]]:
        """All loaders whose places are saved: given by themselves, or inside other objects."""
        yield from self._loaders.values()
        for one in self._objects.values():
            yield from getattr(one, "resumables", ())

    def boundary(self, step: int, epoch: int, taken: int | None) -> bool:
        """See `Run.boundary`."""
        loops = self._loops
        misuse.check_boundary(step, loops.step, is_open=self._is_open)
        try:
            self._check_loader(taken)
        except ConfigError as error:
            self._shutdown.give_up(error)
        self._updater.settle()
        loops.end_step(step)
        loops.positions[-1] = loop_state.pushed(epoch)
        self._is_open = not self._boundary.pass_through(None, math.inf)
        if self._is_open:
            loops.begin_step()
        else:
            self._boundary.end_loop()
        return not self._is_open

    def _check_loader(self, taken: int | None) -> None:
        """Refuse a loop whose batches are not the ones that its loader has given out.

        Raises:
            ConfigError: Says what to do.
        """
        if not self._loaders:
            return
        ((name, one),) = self._loaders.items()
        problem = ""
        if taken is None:
            problem = (
                f"run.boundary() was called without `taken`, which forge needs to save the place in"
                f" the loader `{name}`. Write run.boundary(step, taken=…), with the number of"
                " batches trained on so far, as the loop itself counts them."
            )
        elif taken > one.taken:
            problem = (
                f"run.boundary(taken={taken}): the loader `{name}` has yielded only {one.taken}"
                " batches. Iterate over the object that was given to forge.Run, and count batches,"
                " not samples."
            )
        elif taken < one.taken - one.ahead:
            problem = (
                f"run.boundary(taken={taken}): the loader `{name}` has already yielded {one.taken}"
                " batches. If the loop reads ahead, a resume would lose the batches in between:"
                " switch reading ahead off, or write forge.data.resumable(…, ahead=1) with the"
                " number of batches that the loop reads ahead."
            )
        elif one.has_left:
            problem = (
                f"the loop has left a pass of the loader `{name}` before its last batch, so a"
                " resumed job could not tell whether to continue that pass. Call"
                f" `{name}.end_pass()` after the `break`."
            )
        if problem:
            raise ConfigError([problem], "The training loop")
        assert taken is not None
        one.pending = one.taken - taken

    def end(self, reason: str) -> None:
        """See `Run.end_loop`."""
        if not self._is_open:
            return
        self._is_open = False
        self._updater.settle()
        self._loops.end_step(None)
        self._boundary.break_off(reason)
