"""A process that hits itself at a known step: how `forge rehearse` stops and kills a run.

    FORGE_STRIKE="SIGKILL 18 0.4"

is SIGKILL once this process has come to its 18th step boundary, counted over all its runs, and
0.4 of a step later, by the time of the step before it, or at the next boundary if the machine is
too busy for that: never in another step. 0 is at the boundary, before its save.
A signal from outside would come too late for a script that takes a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

VARIABLE = "FORGE_STRIKE"

_boundaries: list[float] = []
"""When each one came, while a strike is to come."""
_pending: list[signal.Signals] = []
"""The signal that a thread is to send within this step; whoever takes it out of here sends it."""


def arrive() -> None:
    """This process has come to a step boundary; nothing happens where nobody rehearses."""
    if _pending:
        _strike()  # its thread has not come to it
    strike = os.environ.get(VARIABLE)
    if strike is None:
        return
    name, count, fraction = strike.split()
    _boundaries.append(time.monotonic())
    if len(_boundaries) < int(count):
        return
    del os.environ[VARIABLE]  # once, and none for the processes that begin from here on
    _pending.append(signal.Signals[name])
    delay_s = float(fraction) * (_boundaries[-1] - _boundaries[-2] if len(_boundaries) > 1 else 0)
    if delay_s == 0:
        _strike()
    else:
        threading.Timer(delay_s, _strike).start()


def _strike() -> None:
    with contextlib.suppress(IndexError):  # none is to come
        os.kill(os.getpid(), _pending.pop())
