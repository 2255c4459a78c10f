"""Sends a signal to this process at a given step, for `forge rehearse` to stop and kill a run.

    FORGE_STRIKE="SIGKILL 18 0.4"

sends SIGKILL 0.4 of a step after this process has reached its 18th step boundary, counted over all
its Runs. A step's length is that of the step before. If the machine is too busy for that, the
signal comes at the next boundary, never in another step. 0 means at the boundary, before its save.
A signal from another process would be too late for a script that takes only a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from forge.group.requests import Watcher
from forge.jobdir.ledger_writer import Ledger

VARIABLE = "FORGE_STRIKE"

_boundaries: list[float] = []
"""The times of the last boundaries, while a signal is still to be sent."""
_pending: list[signal.Signals] = []
"""The signal that a thread sends within this step; removed by whichever thread sends it."""


class FaultInjector(Watcher):
    """Sends the signal, and records the evaluations of a rehearsed run in its ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_evaluation(self, step: int) -> None:
        """Record it: the report says if a rehearsal had no evaluation."""
        self._ledger.write("evaluated", step=step)

    def on_boundary(self, step: int) -> None:
        """Count a step boundary, and send the signal if it is due."""
        if _pending:
            _strike()  # the thread has not sent it yet
        strike = os.environ.get(VARIABLE)
        if strike is None:
            return
        name, count, fraction = strike.split()
        _boundaries.append(time.monotonic())
        if len(_boundaries) < int(count):
            return
        del os.environ[VARIABLE]  # send it once, and not in child processes that start from now on
        _pending.append(signal.Signals[name])
        last_s = _boundaries[-1] - _boundaries[-2] if len(_boundaries) > 1 else 0
        delay_s = float(fraction) * last_s
        if delay_s == 0:
            _strike()
        else:
            threading.Timer(delay_s, _strike).start()


def _strike() -> None:
    with contextlib.suppress(IndexError):  # the signal was already sent
        os.kill(os.getpid(), _pending.pop())
