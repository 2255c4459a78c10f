"""Printing and logging that never blocks training.

If the pipe behind stderr is full, a write to it blocks, and a blocked main thread cannot save.
Messages therefore go through a daemon thread: `say` usually returns once its text is written, but
waits at most `PATIENCE_S`. Text goes to the logger `forge` if logging is configured (Hydra does
that), else to stderr.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterable

PATIENCE_S = 0.5
"""Seconds that one message can block its sender."""

_logger = logging.getLogger("forge")


class _Writer:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, str, threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: threading.Event | None = None

    def put(self, level: int, text: str) -> None:
        is_stuck = self._last is not None and not self._last.is_set()
        done = threading.Event()
        self._last = done
        self._queue.put((level, text, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="forge-messages", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is shutting down and starts no threads
                return
        # If the last message is still blocked, this one would be blocked too: do not wait.
        done.wait(0.0 if is_stuck else PATIENCE_S)

    def wait(self, timeout_s: float) -> None:
        if self._last is not None:
            self._last.wait(timeout_s)

    def _run(self) -> None:
        while True:
            level, text, done = self._queue.get()
            emit(level, text)
            done.set()


def emit(level: int, text: str) -> None:
    """Write one message in this thread; can block."""
    text = escape(text, "\n\t")  # log files cannot encode lone surrogates either
    is_silenced = logging.root.manager.disable >= level or _logger.disabled
    if _logger.hasHandlers() and (_logger.isEnabledFor(level) or is_silenced):
        _logger.log(level, text)
        return
    if sys.__stderr__ is None or sys.__stderr__.closed:
        return  # stderr is closed; descriptor 2 can belong to another file by now
    # Not sys.stderr: a thread blocked inside its lock would abort the interpreter's exit.
    with contextlib.suppress(OSError):  # stderr is closed
        os.write(2, f"forge: {text}\n".encode())


_writer = _Writer()


def say(text: str, level: int = logging.INFO) -> None:
    """Log a message; blocks for at most `PATIENCE_S`."""
    _writer.put(level, text)


def warn(text: str) -> None:
    """Log a warning."""
    say(text, logging.WARNING)


def wait(timeout_s: float) -> None:
    """Wait until the last message is written; call it before `os._exit`."""
    _writer.wait(timeout_s)


def escape(text: str, kept: str = "") -> str:
    """Escape all unprintable characters, which a terminal could execute, except those in `kept`."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def truncate_list(names: Iterable[object], most: int) -> str:
    """`a, b and 3 more`: the first `most` names and the number of the others."""
    found = list(map(str, names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def size(num_bytes: float) -> str:
    """A number of bytes for people: `512 bytes`, `1.5 GiB`."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def _start_again() -> None:
    global _writer
    _writer = _Writer()


# A forked child inherits the queue but not the thread.
os.register_at_fork(after_in_child=_start_again)
