"""A thread that sends the metrics of a Run to one logger, without ever stopping the training.

The thread reads the Run's ledger, as another process would: the training does not wait for the
logger, and a logger that was away gets what it has missed. After a failure the thread starts over,
which repeats nothing, since a logger says which step it lacks first.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from typing import Any

from forge import messages
from forge.config.schema import SIGNALS
from forge.jobdir.metric_rows import MetricSource, RowReader

_POLL_S = 1.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


class Follower:
    """Sends the rows of a Run to a logger, until `finish`."""

    def __init__(self, logger: Any, source: MetricSource) -> None:
        """`logger` is a `Logger`, which imports this module."""
        self._logger = logger
        self._source = source
        self._closing = threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._follow, name="forge-logger", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self) -> None:
        """The Run has ended: send what is left, and end the thread."""
        self._closing.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            messages.warn(
                f"{self._logger} has not taken all values in time when the Run ended;"
                f" {self._what_next()}"
            )

    def _what_next(self) -> str:
        job = messages.escape(str(self._source.job))
        return (
            "the ledger has them all. A resumed job sends what is missing; so does"
            f" `forge.loggers.export({job!r}, …)`"
        )

    def _follow(self) -> None:
        # The processes of a logger inherit this: Slurm signals every process of a step.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.Signals[f"SIG{one}"] for one in SIGNALS})
        wait_s = _FIRST_RETRY_S
        while True:
            is_last = self._closing.is_set()
            try:
                self._send_all()
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, training continues
                self._warn(error)
                with contextlib.suppress(Exception):
                    self._logger.close(is_finished=False)
            if is_last:
                return
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            messages.warn(
                f"{self._logger} failed, and forge keeps trying while training continues:"
                f" {type(error).__name__}: {error}. Until it works, {self._what_next()}"
            )

    def _send_all(self) -> None:
        reader = RowReader(self._source)
        first: int | None = None
        while True:
            is_last = self._closing.is_set()
            complete = self._source.num_complete()  # before reading: these rows are in the file
            for step in reader.poll():
                is_start = first is None
                # The last step done can still get values, of evaluations that a stop put off.
                first = self._logger.on_resume(max(step - 1, 0) if is_start else step)
                if is_start:
                    reader.read_earlier(first)
                complete = min(complete, step)  # it can be the number before a rollback
            if first is not None:
                end = self._num_final(reader, complete, is_last=is_last)
                first = self._send(reader, first, end)
            if is_last:
                self._logger.close(is_finished=reader.has_finished)
                return
            self._has_warned = False
            self._closing.wait(_POLL_S)

    def _num_final(self, reader: RowReader, complete: float, *, is_last: bool) -> float:
        """The step before which no value can change or be taken back any more."""
        if is_last and (reader.has_finished or self._logger.can_rewind):
            return math.inf
        if self._source.rollback_steps is None or self._logger.can_rewind:
            return complete
        at_most = complete - self._source.rollback_steps
        saved = [one for one in reader.saved if one <= at_most]
        preferred = [one for one in saved if one % self._source.every_steps == 0]
        return max(preferred or saved, default=0)

    def _send(self, reader: RowReader, first: int, end: float) -> int:
        """Send the rows before step `end`; returns the first step that was not sent."""
        due = [reader.rows.pop(step) for step in list(reader.rows) if step < end]
        due = [row for row in due if row.step >= first]
        if not due:
            return first
        self._logger.write(due)
        return due[-1].step + 1
