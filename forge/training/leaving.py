"""How an attempt leaves: stopped, halted by the NaN policy, or by what makes going on useless."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

from forge import messages
from forge.errors import (
    CheckpointError,
    ConfigError,
    DirectoryInUse,
    Exit,
    ExitCode,
    ForgeError,
    RankFailed,
    RankLost,
    Reason,
)
from forge.group.facts import StopAsked
from forge.process.time_limit import TimeLimit
from forge.shutdown import stopping
from forge.shutdown.signal_handler import ShutdownHandler
from forge.training.decide import Halt
from forge.training.loop.loops import Loops
from forge.training.start.run_directory import RunDirectory

ENDS = (CheckpointError, ConfigError, DirectoryInUse, RankFailed, RankLost)
"""What ends the job: a checkpoint that cannot be written, a state that cannot be saved."""

_LONG_WAIT_S = 5.0
"""A stop that waits longer for the end of a step is worth a word."""


class Leaving:
    """The exits of one attempt.

    Args:
        loops: Where the run is.
        directory: Where it is recorded why the attempt leaves.
        handler: Of the signals; it forces the exit where leaving takes too long.
        limit: The time limit.
        before: Called first: what happens from then on, leaving may have caused.
    """

    def __init__(
        self,
        loops: Loops,
        directory: RunDirectory,
        handler: ShutdownHandler,
        limit: TimeLimit,
        before: Callable[[], None],
    ) -> None:
        self._before = before
        self._loops = loops
        self._directory = directory
        self._handler = handler
        self._limit = limit
        self.exit: Exit | None = None
        """By which the process leaves, once it does."""
        handler.held_up_by = self._held_up_by

    def asked(self) -> StopAsked:
        """A stop, as the signal that was received asks for it, or for the time limit."""
        received = self._handler.signal_received
        if received is None:
            return StopAsked(int(ExitCode.REQUEUE), Reason.time_limit)
        code = int(self._handler.exit_code)
        return StopAsked(code, Reason.of_code(code), received.name)

    def stop(self, asked: StopAsked, save: Callable[[], None] | None) -> NoReturn:
        """Save and leave; without a save in the middle of a step."""
        name = asked.signal or asked.text or asked.reason.value
        self._handler.begin_deadline()
        self._directory.metrics.flush()
        try:
            if save is not None:
                save()
        except ENDS as error:
            self.give_up(error, f"{name}, but {error}")
        details: dict[str, Any] = {}
        if asked.signal is not None:
            name, details = f"stopped by {name}", {"signal": asked.signal}
        elif asked.reason is Reason.time_limit:
            details = {"left_s": round(self._limit.left_s, 1)}
        self._leave(asked.code, name, "stop", reason=asked.reason, **details)

    def halt(self, halt: Halt) -> NoReturn:
        """Leave without a save."""
        if halt.code != ExitCode.HALTED:
            self._leave(halt.code, halt.text, "error", logging.ERROR, halt.reason)
        self._directory.metrics.flush()
        self._directory.saver.finish()
        text = f"halted by the NaN policy: {halt.text}. {self._directory.in_place()}"
        self._leave(halt.code, text, "halt", logging.ERROR)

    def restart(self, text: str) -> NoReturn:
        """Leave, to begin again at what was saved."""
        self._leave(int(ExitCode.REQUEUE), text, "stop")

    def give_up(self, error: ForgeError, text: str | None = None) -> NoReturn:
        """Leave for an error that no later step could mend."""
        text = text or str(error)
        if isinstance(error, RankLost):
            self._handler.begin_deadline()
        self._leave(error.exit_code, text, "error", logging.ERROR, error.reason)

    def raise_again(self) -> None:
        """Something has swallowed the exit: a stop still is a stop."""
        if self.exit is not None:
            raise self.exit

    def act_last(self, error: BaseException | None) -> None:
        """All ranks have run their callbacks: the job is started again, if somebody does that."""
        if self.exit is not None:
            self.exit.code = stopping.last_act(int(self.exit.code or 0), self.exit.reason)
        elif error is not None and self._handler.should_shutdown():  # a helper heard it first
            stopping.last_act(int(ExitCode.FORCED), Reason.forced)

    def _leave(
        self,
        code: int,
        text: str,
        kind: str,
        level: int = logging.INFO,
        reason: Reason | None = None,
        **details: Any,
    ) -> NoReturn:
        """Log, run the callbacks, end the children, raise; the reason is by default the code's."""
        self._before()
        reason = reason or Reason.of_code(code)
        self._directory.end(kind, reason, text, self._loops.step, code, level, **details)
        self._loops.close()  # a DataLoader's workers end in their own way, before all others
        self.exit = stopping.leave(int(code), text, reason)
        raise self.exit

    # -- a stop that had to wait ---------------------------------------------------------------

    def log_wait(self) -> None:
        """A step has ended that a stop waited for."""
        asked_at = self._handler.asked_at
        if asked_at is not None and time.monotonic() - asked_at > _LONG_WAIT_S:
            messages.warn(f"Step {self._loops.step - 1} ended{self._waited()}")

    def _held_up_by(self) -> str:
        if not self._loops.is_in_step:
            return ""
        return f". Step {self._loops.step} had not ended{self._waited()}"

    def _waited(self) -> str:
        asked_at = self._handler.asked_at or time.monotonic()
        return (
            f" {time.monotonic() - asked_at:.0f} s after the stop was asked for: if that is an"
            " evaluation, make it a function of `run.every`, in which a stop need not wait"
        )
