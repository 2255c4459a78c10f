"""The signals that stop a sweep, or stop waiting for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *more: int) -> Iterator[None]:
    """Handle SIGINT, SIGTERM, SIGHUP and `more` inside, if this is the main thread."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # exit codes would be lost
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stopping in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more):
            if signal.getsignal(stopping) is not signal.SIG_IGN:  # nohup
                before[stopping] = signal.signal(stopping, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
