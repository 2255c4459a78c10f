"""Supervision of child processes: orphans, and signals and ends that can be polled."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

_SET_CHILD_SUBREAPER = 36  # prctl(2)
_SET_PDEATHSIG = 1


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Only on Linux."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int | None = None) -> None:
    """Have the kernel signal this process when its parent ends. Only on Linux.

    Args:
        number: The signal; None: SIGKILL.
    """
    _prctl(_SET_PDEATHSIG, signal.SIGKILL if number is None else number)


def _prctl(option: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def listen(numbers: Iterable[int]) -> int:
    """Receive signals through a descriptor that can be polled, instead of by interruption.

    Returns:
        The descriptor; `drain` reads it.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    return reader


def drain(reader: int) -> bytes:
    """The numbers of the signals received since the last call."""
    try:
        return os.read(reader, 512)
    except BlockingIOError:
        return b""


def fork() -> int:
    """Like os.fork, but the child starts with all signals blocked.

    Until it sets its own handlers it has its parent's, and would report its signals to the parent
    through the descriptor of `listen`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> wait status.

    Raises:
        ChildProcessError: If there are no children at all.
    """
    found: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            if not found:
                raise
            return found
        if pid == 0:
            return found
        found[pid] = status
