"""Signals in forked children: which SIGTERM is for the child alone.

Slurm signals every process of a step, helper processes of the script among them. A child ignores a
SIGTERM that its parent got as well, since the parent ends it later; a SIGTERM for the child alone
(`Process.terminate`) ends it as usual. The parent notes the time of each SIGTERM in memory that it
shares with its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from forge.process import processes

_TIME = struct.Struct("<d")
_TIMESPEC = struct.Struct("@ll")

_SAME_S = 0.5
"""Seconds between the SIGTERMs of a parent and of its child that count as one, sent to both."""

_SO_TIMESTAMPNS = 35
"""Linux: each message that a socket receives has the time at which it was sent. socket(7)."""


class ForkedChildren:
    """The forked children of a process with a ShutdownHandler; most of it runs in the child."""

    def __init__(self) -> None:
        self._heard = mmap.mmap(-1, _TIME.size)  # shared with the children
        self._ignored = 0.0
        """The time of the parent's SIGTERM that was noted at the last fork, or ignored since."""
        self._numbers: Iterable[int] = ()
        self._trips: dict[int, FrameType | None] = {}
        self._pipe: socket.socket | None = None
        self._pid = 0
        """The pid of the parent."""

    def watch(
        self, numbers: Iterable[int], trips: dict[int, FrameType | None], pipe: socket.socket
    ) -> None:
        """Adopt every child that is forked from now on.

        Args:
            numbers: The signals that the parent handles, read at each fork.
            trips: The parent's signals; a child begins with none.
            pipe: The pipe that the parent reads its signals from.
        """
        self._numbers, self._trips, self._pipe, self._pid = numbers, trips, pipe, os.getpid()
        _parents.add(self)

    def let_go(self) -> None:
        """Adopt no more children."""
        _parents.discard(self)

    def note_sigterm(self) -> None:
        """Tell the children that the parent has got a SIGTERM."""
        _TIME.pack_into(self._heard, 0, time.time())

    def disown(self) -> None:
        """From now on a SIGTERM to a child is meant for it, and ends it."""
        _TIME.pack_into(self._heard, 0, 0.0)

    def begin_fork(self) -> None:
        """Runs before a fork: a SIGTERM that the parent notes later can have met the child, too."""
        (self._ignored,) = _TIME.unpack_from(self._heard)

    def adopt(self) -> None:
        """Runs in a child that was just forked."""
        self._trips.clear()
        # A new pipe: a signal to the child alone must not stop the parent.
        reader, self._writer = socket.socketpair(type=socket.SOCK_DGRAM)
        self._writer.setblocking(False)  # noqa: FBT003 - positional there
        if sys.platform.startswith("linux"):
            reader.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._act, args=(reader,), name="forge-child", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The Python part of the handler in a child, whose thread acts on the signal.

        It can run too late: if the main thread was about to wait for a lock, it waits first.
        """
        own = self._writer.fileno()
        if signal.set_wakeup_fd(own, warn_on_full_buffer=False) != own:
            with contextlib.suppress(BlockingIOError):  # other code had replaced the descriptor
                self._writer.send(bytes([number]))

    def _act(self, reader: socket.socket) -> None:
        """The thread of a child."""
        while True:
            text, parts, *_ = reader.recvmsg(1, socket.CMSG_SPACE(_TIMESPEC.size))
            arrived = time.time()
            for _, kind, data in parts:  # the thread could have waited for the GIL
                if kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = _TIMESPEC.unpack(data)
                    arrived = seconds + nanoseconds / 1e9
            if signal.getsignal(signal.SIGTERM) != self._on_signal:
                continue  # the child has a handler of its own, such as that of its own Run
            if text == bytes([signal.SIGTERM]) and not self._is_of_both(arrived):
                # In Python only the main thread may set the default action.
                ctypes.CDLL(None).signal(signal.SIGTERM, 0)
                os.kill(os.getpid(), signal.SIGTERM)

    def _is_of_both(self, arrived: float) -> bool:
        """Whether a SIGTERM came to the parent, too."""
        began = time.monotonic()
        while time.monotonic() - began < 0.25:
            (heard,) = _TIME.unpack_from(self._heard)
            if heard != self._ignored and abs(heard - arrived) < _SAME_S:
                self._ignored = heard
                return True
            if self._is_unread(signal.SIGTERM):
                return True  # the parent is stopped or starved, or its main thread has the GIL
            time.sleep(0.01)  # the parent gets the signal within microseconds, or not at all
        return False

    def _is_unread(self, number: int) -> bool:
        """Whether the parent has not taken a signal yet, or not read it from its pipe."""
        assert self._pipe is not None
        if processes.is_pending(self._pid, number):
            return True
        try:
            return number in self._pipe.recv(512, socket.MSG_PEEK)
        except OSError:
            return False


def _before_fork() -> None:
    if _parents:
        _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, _ALL))
        for parent in list(_parents):
            parent.begin_fork()


def _after_fork_in_parent() -> None:
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _after_fork_in_child() -> None:
    if _masks:
        try:
            for parent in list(_parents):
                parent.adopt()
        finally:  # no thread can be started at a limit of processes
            signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


_parents: weakref.WeakSet[ForkedChildren] = weakref.WeakSet()
_masks: list[Any] = []
_ALL = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
