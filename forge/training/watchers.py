"""Watchers of every Run: its stops, its progress in the ledger, its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from forge.errors import ExitCode, Reason
from forge.group.requests import Request, SaveRequest, StopRequest, Watcher
from forge.jobdir.ledger_writer import Ledger
from forge.process import sections
from forge.process.time_limit import TimeLimit
from forge.shutdown.signal_handler import ShutdownHandler
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.nan_policy import NanPolicy
from forge.training.saver import Saver


class Watchers:
    """The methods of all watchers of a Run, by name, in the order of `Attempt._watchers`."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self.on_boundary = self._all(Watcher.on_boundary)
        self.request = self._all(Watcher.request)
        self.before_step = self._all(Watcher.before_step)
        self.on_step = self._all(Watcher.on_step)
        self.on_batch = self._all(Watcher.on_batch)
        self.on_evaluation = self._all(Watcher.on_evaluation)
        self.on_loop_end = self._all(Watcher.on_loop_end)
        self.on_stop = self._all(Watcher.on_stop)

    def _all(self, method: Callable[..., Any]) -> list[Callable[..., Any]]:
        name = method.__name__
        return [
            getattr(one, name) for one in self._watchers if getattr(type(one), name) is not method
        ]


class StopWatcher(Watcher):
    """Requests a stop after a signal or near the time limit, and a save after a signal."""

    def __init__(
        self, handler: ShutdownHandler, limit: TimeLimit, saver: Saver, nan: NanPolicy
    ) -> None:
        self._handler = handler
        self._saver = saver
        self._nan = nan
        self.limit = limit

    @property
    def is_stopping(self) -> bool:
        """Whether a stop is pending, after a signal or near the time limit."""
        is_near = self.limit.is_set and self.limit.is_near(self._saver.cost_s)
        return is_near or self._handler.should_shutdown()

    def stop_request(self) -> StopRequest:
        """The stop that the received signal, or the time limit, leads to."""
        received = self._handler.signal_received
        if received is None:
            return StopRequest(int(ExitCode.REQUEUE), Reason.time_limit)
        code = int(self._handler.exit_code)
        return StopRequest(code, Reason.of_code(code), received.name)

    def on_boundary(self, step: int) -> None:
        """Measure the time since the last boundary."""
        self.limit.end_interval()

    def request(self, step: int) -> Request | None:
        """A stop or a save, after a signal."""
        if self._handler.signal_received is not None:
            return self.stop_request()
        if self._handler.take_save_request():
            return SaveRequest(step, rollbacks=self._nan.rollbacks)
        return None

    def before_step(self, step: int) -> Request | None:
        """A stop, if the time limit is near."""
        if not self.limit.is_set or self.limit.allows_step(self._saver.cost_s):
            return None
        return self.stop_request()

    def on_step(self, step: int) -> None:
        """From now on a stop has to wait."""
        self.limit.begin_interval()


class LedgerWatcher(Watcher):
    """Records the progress in the ledger."""

    def __init__(self, ledger: Ledger, loops: LoopProgress) -> None:
        self._ledger = ledger
        self._loops = loops

    def on_boundary(self, step: int) -> None:
        """Record the steps done."""
        self._ledger.progress(step, self._loops.planned)


class TimeWatcher(Watcher):
    """Records when training begins, when it has done again what was lost, and evaluations.

    With these events a reader of the ledger accounts for all of the job's time.
    """

    def __init__(self, ledger: Ledger, resumed_at: int) -> None:
        """`resumed_at`: number of steps done at the start of this attempt."""
        self._ledger = ledger
        before = ledger.previous_step
        self._lost = before if before is not None and before >= resumed_at else None
        """The last step that an earlier attempt had begun, if it is repeated; None: none is."""
        self._has_begun = False
        self._evaluates: float | None = None
        """When the current evaluation began, by the monotonic clock."""

    def on_boundary(self, step: int) -> None:
        """The code after a pass has ended."""
        if self._evaluates is not None:
            self._end_evaluation(step)

    def request(self, step: int) -> None:
        """Functions of `run.every` have ended; nothing is requested."""
        if self._evaluates is not None:
            self._end_evaluation(step)

    def on_step(self, step: int) -> None:
        """The first step begins, or the first that no earlier attempt has begun."""
        if not self._has_begun:
            self._has_begun = True
            self._ledger.write("training", step=step)
        if self._lost is not None and step > self._lost:
            self._lost = None
            self._ledger.write("caught_up", step=step)

    def on_evaluation(self, step: int) -> None:
        """An evaluation begins."""
        self._evaluates = time.monotonic()

    def on_loop_end(self, step: int) -> None:
        """The code after the last pass has ended."""
        if self._evaluates is not None:
            self._end_evaluation(step)

    def on_stop(self) -> None:
        """A stop has ended the evaluation."""
        if self._evaluates is not None:
            self._end_evaluation(None)

    def _end_evaluation(self, step: int | None) -> None:
        assert self._evaluates is not None
        seconds, self._evaluates = time.monotonic() - self._evaluates, None
        self._ledger.write("evaluation", step=step, seconds=round(seconds, 4))


class HeartbeatWatcher(Watcher):
    """Begins the section of a step, whose time limit shows a hang."""

    def on_step(self, step: int) -> None:
        """A step has a time limit."""
        sections.current().begin_step()

    def on_loop_end(self, step: int) -> None:
        """The code after a loop has none."""
        sections.current().rest()
