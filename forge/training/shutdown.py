"""Ends an attempt: at a stop, by the NaN policy, or for an error that further steps cannot fix."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from forge.group.requests import StopRequest
from forge.process.time_limit import TimeLimit
from forge.shutdown import stopping
from forge.shutdown.signal_handler import ShutdownHandler
from forge.training.decide import Halt
from forge.training.loop.loop_progress import LoopProgress
from forge.training.start.attempt_io import AttemptIO
from forge.training.watchers import Watchers

ENDS = (CheckpointError, ConfigError, DirectoryInUse, RankFailed, RankLost)
"""Errors that end the job, such as a state that cannot be saved."""

_LONG_WAIT_S = 5.0
"""A stop that waits longer than this for the end of a step is logged."""


class Shutdown:
    """The ways in which an attempt ends.

    Args:
        loops: The current step and loop.
        directory: The attempt's files, in which the reason is recorded.
        handler: Handles signals; forces the exit if stopping takes too long.
        limit: The time limit.
        watchers: Told first, so that they do not take consequences of the exit for failures.
    """

    def __init__(
        self,
        loops: LoopProgress,
        directory: AttemptIO,
        handler: ShutdownHandler,
        limit: TimeLimit,
        watchers: Watchers,
    ) -> None:
        self._watchers = watchers
        self._loops = loops
        self._directory = directory
        self._handler = handler
        self._limit = limit
        self.exit: Exit | None = None
        """The exception that ends the process, once it has been raised."""

    def stop(self, request: StopRequest, save: Callable[[], None] | None) -> NoReturn:
        """Save and exit; in the middle of a step without a save."""
        name = request.signal or request.reason.value
        self._handler.begin_deadline()
        self._directory.metrics.flush()
        try:
            if save is not None:
                save()
        except ENDS as error:
            self.give_up(error, f"{name}, but {error}")
        details: dict[str, Any] = {}
        if request.signal is not None:
            name, details = f"stopped by {name}", {"signal": request.signal}
        elif request.reason is Reason.time_limit:
            details = {"left_s": round(self._limit.left_s, 1)}
        self._shut_down(request.code, name, "stop", reason=request.reason, **details)

    def halt(self, halt: Halt) -> NoReturn:
        """Exit without a save."""
        if halt.code != ExitCode.HALTED:
            self._shut_down(halt.code, halt.text, "error", logging.ERROR)
        self._directory.metrics.flush()
        self._directory.saver.finish()
        text = f"halted by the NaN policy. {halt.text}; {self._directory.in_place()}"
        self._shut_down(halt.code, text, "halt", logging.ERROR)

    def restart(self, text: str) -> NoReturn:
        """Exit, to be started again from the last checkpoint."""
        self._shut_down(int(ExitCode.REQUEUE), text, "stop")

    def give_up(self, error: ForgeError, text: str | None = None) -> NoReturn:
        """Exit for an error that no later step can fix."""
        text = text or str(error)
        if isinstance(error, RankLost):
            self._handler.begin_deadline()
        self._shut_down(error.exit_code, text, "error", logging.ERROR, error.reason)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """In the block, an error that no later step can fix ends the job."""
        try:
            yield
        except ENDS as error:
            self.give_up(error)

    def raise_again(self) -> None:
        """Raise the exit again if the script has caught it."""
        if self.exit is not None:
            raise self.exit

    def act_last(self, error: BaseException | None) -> None:
        """Requeue the job, if something requeues it, after all ranks have run their callbacks."""
        if self.exit is not None:
            self.exit.code = stopping.last_act(int(self.exit.code or 0), self.exit.reason)
        elif error is not None and self._handler.should_shutdown():  # a helper got it first
            stopping.last_act(int(ExitCode.FORCED), Reason.forced)

    def _shut_down(
        self,
        code: int,
        text: str,
        kind: str,
        level: int = logging.INFO,
        reason: Reason | None = None,
        **details: Any,
    ) -> NoReturn:
        """Log, run callbacks, end child processes, raise; `reason` defaults to that of the code."""
        for tell in self._watchers.on_stop:
            tell()
        reason = reason or Reason.of_code(code)
        asked_at = self._handler.asked_at
        if asked_at is not None:
            waited_s = time.monotonic() - asked_at
            details["asked"] = round(time.time() - waited_s, 3)
        self._directory.record_end(kind, reason, text, self._loops.step, code, level, **details)
        self._loops.close()  # DataLoader workers shut down by themselves, before other children
        self.exit = stopping.leave(int(code), text, reason)
        raise self.exit

    # -- a stop that had to wait ---------------------------------------------------------------

    def log_wait(self) -> None:
        """Log a step that a stop had to wait for."""
        asked_at = self._handler.asked_at
        if asked_at is not None and time.monotonic() - asked_at > _LONG_WAIT_S:
            messages.warn(f"Step {self._loops.step - 1} ended{self._waited()}")

    def held_up_by(self) -> str:
        """The step that a forced exit interrupts, for its message; called from any thread."""
        if not self._loops.is_in_step:
            return ""
        return f". Step {self._loops.step} had not ended{self._waited()}"

    def _waited(self) -> str:
        asked_at = self._handler.asked_at or time.monotonic()
        return (
            f" {time.monotonic() - asked_at:.0f} s after the stop was requested: if the step has an"
            " evaluation, move it into a function of `run.every`, which a stop can interrupt"
        )
