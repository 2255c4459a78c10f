"""The heartbeat page: shared memory in which a task records what it is doing for its supervisor.

    supervisor   page = HeartbeatPage.create(); starts the task with page.environ; polls page.read()
    task         marks = HeartbeatWriter.open(os.environ); marks.enter(Phase.save, step, limit_s), …

The page has one record: the section, the step, a count that grows with each heartbeat, and the
number of seconds without a heartbeat after which the task counts as hanging. The supervisor
measures that time, since it knows when the task was suspended or traced.

A heartbeat is a few stores to shared memory, which can neither block nor fail: a file on a network
disk could block training, and a truncated mapped file would raise SIGBUS. The page is written when
it is created, and sealed against truncation; `stacks.py` has the task append its stacks to the same
memory. Only on Linux; elsewhere there are no heartbeats.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from forge.jobdir.job_files import PROGRESS

_SIZE = mmap.PAGESIZE
_SEQUENCE, _PID, _SECTION, _STEP, _COUNT, _LIMIT = range(6)
"""Indices of the 8-byte words; the sequence number is odd while the others are being written."""
_WORDS = struct.Struct("5qd")
_FLOCK = "hhqqi4x"
"""Linux's struct flock: type, whence, start, length, pid."""


class Phase(IntEnum):
    """The phase that the main thread of a task is in."""

    outside = 0
    """Before `forge.Run`, after it and after each of its loops: no limit."""
    start_up = 1
    """From entering the Run to the end of the first boundary; each read is a heartbeat."""
    step = 2
    """From one boundary to the next."""
    save = 3
    """Each write is a heartbeat."""
    evaluation = 4
    """Each `run.check_stop()` is a heartbeat."""
    collective = 5
    """forge waits for other ranks."""
    compilation = 6
    """torch compiles during a step."""


@dataclass(frozen=True)
class HeartbeatRecord:
    """The last record of a task."""

    pid: int = 0
    """The process that wrote it; 0: no process has."""
    section: Phase = Phase.outside
    step: int = 0
    """Steps done."""
    count: int = 0
    """Number of heartbeats: a section entered or left, bytes saved, a batch evaluated."""
    limit_s: float = 0.0
    """Seconds without a heartbeat until it counts as a hang; 0: no limit."""


class HeartbeatPage:
    """The supervisor's side; the page exists as long as supervisor or task map it."""

    def __init__(self, fd: int = -1) -> None:
        """Map the page of `create`; `close` closes `fd`. -1: there is no page."""
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE, access=mmap.ACCESS_READ) if fd >= 0 else None

    @classmethod
    def create(cls) -> HeartbeatPage:
        """Create a page; if the system does not support it, a page without heartbeats."""
        if sys.platform != "linux":
            return cls()
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create(f"forge-{secrets.token_hex(8)}", flags)
            os.write(fd, bytes(_SIZE))  # allocate the memory now, so that heartbeats cannot fail
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError:  # not supported by the kernel or sandbox: hangs are not detected
            return cls()
        return cls(fd)

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which a task of the same user finds the page."""
        return {} if self._memory is None else {PROGRESS: f"/proc/{os.getpid()}/fd/{self.fd}"}

    def read(self) -> HeartbeatRecord | None:
        """The last record; None while it is being written."""
        if self._memory is None:
            return HeartbeatRecord()
        words = _WORDS.unpack_from(self._memory)
        # Read twice: the processor can reorder the task's stores.
        if words[_SEQUENCE] & 1 or words != _WORDS.unpack_from(self._memory):
            return None
        _, pid, section, step, count, limit_s = words
        return HeartbeatRecord(pid, Phase(section), step, count, limit_s)

    def is_held(self) -> bool:
        """Whether a process has the page open for writing; False once it was killed or exec'ed."""
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, wanted))
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        """Unmap the page; a task that still writes heartbeats is not affected."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            os.close(self.fd)


class HeartbeatWriter:
    """The task's side, for one thread; only one process writes at a time, and no forked child."""

    def __init__(self, fd: int = -1) -> None:
        """Map the page that `open` has found; -1: heartbeats are dropped."""
        self._fd, self._pid = fd, os.getpid()
        self._count = 0
        self._words: memoryview | None = None
        if fd >= 0:
            self._memory = mmap.mmap(fd, _SIZE)
            plain = memoryview(self._memory)
            self._words, self._reals = plain.cast("q"), plain.cast("d")
            self._count = self._words[_COUNT]
            _open.append(self)

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> HeartbeatWriter:
        """Open the supervisor's page, if there is one and no other process writes to it."""
        path = environ.get(PROGRESS, "")
        if sys.platform != "linux" or not path:
            return cls()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the supervisor has ended
            return cls()
        try:
            # The pid in the path can be reused: the seal shows that this is a heartbeat page.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked children do not inherit it
                return cls(fd)
        except OSError:
            pass  # not a heartbeat page, or another process of this task writes to it
        os.close(fd)
        return cls()

    @property
    def is_open(self) -> bool:
        """Whether there is a page to write to."""
        return self._words is not None

    def enter(self, section: Phase, step: int, limit_s: float) -> None:
        """Record what the main thread does from now on; this is also a heartbeat.

        Args:
            section: What it does.
            step: Steps done.
            limit_s: Seconds without another heartbeat until it counts as a hang; 0: no limit.
        """
        words = self._words
        if words is None:
            return
        self._count += 1
        sequence = words[_SEQUENCE] | 1  # already odd if an exception interrupted a write
        words[_SEQUENCE] = sequence
        words[_PID] = self._pid
        words[_SECTION] = section
        words[_STEP] = step
        words[_COUNT] = self._count
        self._reals[_LIMIT] = limit_s
        words[_SEQUENCE] = sequence + 1

    def advance(self) -> None:
        """Send a heartbeat in the current section, from any thread."""
        words = self._words
        if words is not None:
            self._count += 1
            words[_COUNT] = self._count  # a single store cannot be torn

    def close(self) -> None:
        """Leave all sections; another process of the task can open the page now."""
        if self._words is not None:
            self.enter(Phase.outside, self._words[_STEP], 0.0)
            self._forget()

    def _forget(self) -> None:
        # Do not unmap: a thread can be writing; the mapping is freed with its last view.
        self._words = None
        _open.remove(self)
        os.close(self._fd)


_open: list[HeartbeatWriter] = []


def _forked() -> None:
    """Stop heartbeats in a forked child, which would be taken for the parent's."""
    for marks in [*_open]:
        marks._forget()


os.register_at_fork(after_in_child=_forked)
