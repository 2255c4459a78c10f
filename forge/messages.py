"""What forge prints and logs, without ever waiting for a reader.

A full stderr pipe blocks whoever writes to it, and a blocked main thread saves nothing. Messages
therefore go through one daemon thread: normally `say` returns once its text is out, but after
`PATIENCE_S` it gives up. Text goes to the logger `forge` where logging is set up (Hydra
does that), else straight to stderr.
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
"""Seconds that one message may hold up its sender."""

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
            except RuntimeError:  # the interpreter is shutting down: no thread, nobody to wait for
                return
        # A reader that let one message wait will let the next one wait as well.
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
    """Write one message in this thread; may block."""
    text = escape(text, "\n\t")  # nor do log files take lone surrogates
    is_silenced = logging.root.manager.disable >= level or _logger.disabled
    if _logger.hasHandlers() and (_logger.isEnabledFor(level) or is_silenced):
        _logger.log(level, text)
        return
    if sys.__stderr__ is None or sys.__stderr__.closed:
        return  # there is nobody to tell, and some file may have its descriptor by now
    # Not sys.stderr: a thread blocked inside its lock would abort the interpreter's exit.
    with contextlib.suppress(OSError):  # stderr is closed: there is nobody to tell
        os.write(2, f"forge: {text}\n".encode())


_writer = _Writer()


def say(text: str, level: int = logging.INFO) -> None:
    """Log something; holds the caller up for `PATIENCE_S` at most."""
    _writer.put(level, text)


def warn(text: str) -> None:
    """Log a warning."""
    say(text, logging.WARNING)


def wait(timeout_s: float) -> None:
    """Until the last message is out, before the process ends without another word."""
    _writer.wait(timeout_s)


def escape(text: str, kept: str = "") -> str:
    """The text without anything that a terminal would obey, but for the characters `kept`."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def few(names: Iterable[object], most: int) -> str:
    """`a, b and 3 more`: the first `most` of them, and how many there are besides."""
    found = list(map(str, names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _start_again() -> None:
    global _writer
    _writer = _Writer()


# A forked child has the queue but not the thread.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
