"""A page of memory in which a task says what it is doing, and its supervisor reads it.

    supervisor   page = Page.create(); starts the task with page.environ; page.read() now and then
    task         marks = Marks.open(os.environ); marks.enter(Section.save, step, limit_s), …

One record: the section, the step, a count that grows with each mark, and after how many seconds
without a change the task is taken to hang. The task writes no times: the supervisor counts those in
which the record stays the same, since it knows when the task was stopped or traced.

It lies in memory that both map. A mark is a few stores, which neither wait nor fail: a file could
block the training on a network disk, or end it by SIGBUS once it is cut short. The page is filled
when it is made, and sealed against being cut; behind it `stacks.py` has the task write what its
threads stand in. Linux; elsewhere nothing is marked.
"""

from __future__ import annotations

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
"""What the words of 8 bytes are; the sequence number is odd while the others are written."""
_WORDS = struct.Struct("5qd")
_FLOCK = "hhqqi4x"
"""Linux's struct flock: type, whence, start, length, pid."""


class Section(IntEnum):
    """What the main thread of a task is doing."""

    outside = 0
    """Before `forge.Run`, after it and after each of its loops: no limit."""
    start_up = 1
    """From entering it to the end of the first boundary; grows with what is read."""
    step = 2
    """From one boundary to the next."""
    save = 3
    """Grows with what is written."""
    evaluation = 4
    """Grows with each `run.check_stop()`."""
    collective = 5
    """forge waits for other ranks."""
    compilation = 6
    """torch compiles, in a step."""


@dataclass(frozen=True)
class Record:
    """What a task has said last."""

    pid: int = 0
    """The process that wrote it; 0: nobody has."""
    section: Section = Section.outside
    step: int = 0
    """Steps done."""
    count: int = 0
    """Grows with each mark: a section entered or left, bytes saved, a batch evaluated."""
    limit_s: float = 0.0
    """Seconds without a change until it hangs; 0: it never does."""


class Page:
    """The reader's side; the page exists as long as one of the two maps it."""

    def __init__(self, fd: int = -1) -> None:
        """Map what `create` has made; `fd` is closed with it. -1: there is none."""
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE, access=mmap.ACCESS_READ) if fd >= 0 else None

    @classmethod
    def create(cls) -> Page:
        """Make one; where there can be none, one in which nobody ever writes."""
        if sys.platform != "linux":
            return cls()
        import fcntl

        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create(f"forge-{secrets.token_hex(8)}", flags)
            os.write(fd, bytes(_SIZE))  # all the memory that marks will ever need
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError:  # a kernel or a sandbox without: nothing is watched, and all else works
            return cls()
        return cls(fd)

    @property
    def environ(self) -> dict[str, str]:
        """Variables by which a task finds it; the task is a process of the same user."""
        return {} if self._memory is None else {PROGRESS: f"/proc/{os.getpid()}/fd/{self.fd}"}

    def read(self) -> Record | None:
        """What was written last; None while it is being written."""
        if self._memory is None:
            return Record()
        words = _WORDS.unpack_from(self._memory)
        # A processor that stores in another order shows it in one of two readings.
        if words[_SEQUENCE] & 1 or words != _WORDS.unpack_from(self._memory):
            return None
        _, pid, section, step, count, limit_s = words
        return Record(pid, Section(section), step, count, limit_s)

    def is_held(self) -> bool:
        """Whether a process marks here: not the one that was killed, or runs another program."""
        import fcntl

        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, wanted))
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        """Forget it; a task that still marks notices nothing."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            os.close(self.fd)


class Marks:
    """The writer's side, for one thread: one process at a time writes, and none that it forks."""

    def __init__(self, fd: int = -1) -> None:
        """Map the page that `open` has found; -1: marks go nowhere."""
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
    def open(cls, environ: Mapping[str, str]) -> Marks:
        """Those of this process, if its supervisor has a page and no other process marks there."""
        path = environ.get(PROGRESS, "")
        if sys.platform != "linux" or not path:
            return cls()
        import fcntl

        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the supervisor is gone
            return cls()
        try:
            # Whatever else lies there by now (the pid may be another's) has no such seal.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by what is forked
                return cls(fd)
        except OSError:
            pass  # no such file, or another process of this task marks: it is waited for by this
        os.close(fd)
        return cls()

    @property
    def is_open(self) -> bool:
        """Whether anybody reads them."""
        return self._words is not None

    def enter(self, section: Section, step: int, limit_s: float) -> None:
        """What the main thread does from now on, and how long it may take.

        Args:
            section: What it does.
            step: Steps done.
            limit_s: Seconds without another mark until it hangs; 0: it never does.
        """
        words = self._words
        if words is None:
            return
        self._count += 1
        sequence = words[_SEQUENCE] | 1  # odd already, where an exception came between
        words[_SEQUENCE] = sequence
        words[_PID] = self._pid
        words[_SECTION] = section
        words[_STEP] = step
        words[_COUNT] = self._count
        self._reals[_LIMIT] = limit_s
        words[_SEQUENCE] = sequence + 1

    def advance(self) -> None:
        """It makes progress in its section; any thread may say so."""
        words = self._words
        if words is not None:
            self._count += 1
            words[_COUNT] = self._count  # one store: nothing to tear

    def close(self) -> None:
        """Outside of all sections; another process of the task may mark from now on."""
        if self._words is not None:
            self.enter(Section.outside, self._words[_STEP], 0.0)
            self._forget()

    def _forget(self) -> None:
        # A thread may be in the middle of a mark: the mapping goes with its last view.
        self._words = None
        _open.remove(self)
        os.close(self._fd)


_open: list[Marks] = []


def _forked() -> None:
    """A worker has the mapping of its parent; it is not what the parent does."""
    for marks in [*_open]:
        marks._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
