"""What the threads of a process stand in, without its help: it may not answer any more.

    supervisor   pages = StackPages.create(); starts the task with pages.environ; pages.gather(pids)
    task         register(os.environ)

By a signal faulthandler writes the stack of the main thread; its handler is C, so it runs where a
call holds the interpreter's lock, too. By another one it writes those of all Python threads, for a
process that is to be killed: it reads them while they run, which can crash it. It writes into
memory that the supervisor made: a disk may be what the process waits for. What hangs outside
Python is shown by the kernel, thread by thread. Linux; elsewhere nothing is gathered.
Source: proc(5), faulthandler.register.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from forge.jobdir.job_files import STACKS
from forge.process import processes

# Others than what writes stacks into the output. Not among those that a policy can name.
SIGNAL: int | None = signal.SIGRTMAX - 3 if sys.platform == "linux" else None
ALL_SIGNAL: int | None = signal.SIGRTMAX - 4 if sys.platform == "linux" else None
_WRITES_S = 1.0
"""Seconds until a process has begun to write; one in the kernel's state D never does."""
_ALL_S = 5.0
"""Seconds for all processes of a task."""
_MOST_BYTES = 2**20
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
_NAME = "forge-stacks"
_LINK = f"/memfd:{_NAME}"
_is_registered = False
"""In this process, or in the one that it was forked from."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Frame(NamedTuple):
    """A line of Python that a thread stands in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def register(environ: Mapping[str, str]) -> None:
    """In a task: have stacks written on signals, where a supervisor has made a place for them.

    Args:
        environ: The environment of this process.
    """
    global _is_registered
    path = environ.get(STACKS, "")
    if SIGNAL is None or ALL_SIGNAL is None or not path or _is_registered:
        return
    import faulthandler

    try:  # stays open as long as the process lives: the handler writes to it
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the supervisor is gone
        return
    faulthandler.register(SIGNAL, file=fd, all_threads=False)
    faulthandler.register(ALL_SIGNAL, file=fd, all_threads=True)
    _is_registered = True


class StackPages:
    """The supervisor's side: memory that the processes of its task write to."""

    def __init__(self, fd: int) -> None:
        """`fd` is what `create` has made; -1: there is none."""
        self._fd = fd

    @classmethod
    def create(cls) -> StackPages:
        """Make it; where that cannot be, only the kernel's view is gathered."""
        if sys.platform != "linux":
            return cls(-1)
        try:
            return cls(os.memfd_create(_NAME, os.MFD_CLOEXEC))
        except OSError:  # a kernel or a sandbox without
            return cls(-1)

    @property
    def environ(self) -> dict[str, str]:
        """Variables by which a task finds it."""
        return {} if self._fd < 0 else {STACKS: f"/proc/{os.getpid()}/fd/{self._fd}"}

    def gather(
        self, pids: Iterable[int], *, is_last: bool = False
    ) -> Generator[None, None, dict[int, str]]:
        """Have processes write their stacks, one after the other; yields while it waits for them.

        Args:
            pids: The most important first: there are seconds for all of them.
            is_last: Whether they are killed then: those of all threads, not of the main one alone.
        Returns:
            pid -> what faulthandler wrote; empty for a process that does not react.
        """
        found: dict[int, str] = {}
        number = ALL_SIGNAL if is_last else SIGNAL
        deadline = time.monotonic() + _ALL_S
        for pid in pids:
            found[pid] = ""
            if number is None or not (self._is_open_in(pid) and processes.catches(pid, number)):
                continue
            os.ftruncate(self._fd, 0)  # what is appended begins here
            if time.monotonic() > deadline or not processes.send(pid, number):
                continue
            begins_by, size, is_growing = time.monotonic() + _WRITES_S, 0, True
            while is_growing and time.monotonic() < (deadline if size else begins_by):
                yield
                now = os.fstat(self._fd).st_size
                size, is_growing = now, now == 0 or now > size
            found[pid] = os.pread(self._fd, _MOST_BYTES, 0).decode(errors="replace")
        return found

    def _is_open_in(self, pid: int) -> bool:
        """Whether it is ours that a process writes to: a handler of its own is not for this."""
        if self._fd < 0:
            return False
        folder = f"/proc/{pid}/fd"
        try:
            own = os.fstat(self._fd)
            return any(
                # By name first: to ask for a file's number may wait for a disk.
                os.readlink(path).startswith(_LINK) and os.path.samestat(os.stat(path), own)
                for path in (f"{folder}/{name}" for name in os.listdir(folder))
            )
        except OSError:  # it is gone, or has closed one meanwhile
            return False


def main_frames(text: str) -> list[Frame]:
    """The stack of a process's main thread, innermost first; empty where it is not shown.

    Args:
        text: What faulthandler has written of it: the main thread is the last of all threads.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        if line == "...":  # there are more threads than it shows, and the main one is the last
            return []
        if line.startswith(("Thread ", "Current thread ", "Stack (")):
            frames = []
        elif line.startswith('  File "'):
            file, _, rest = line.removeprefix('  File "').rpartition('", line ')
            number, _, function = rest.partition(" in ")
            if number.isdecimal():
                frames.append(Frame(file, int(number), function))
    return frames


def own_frame(frames: list[Frame]) -> Frame | None:
    """The innermost frame of a stack that is of the user's own code, else the innermost one."""
    for frame in frames:
        if not frame.file.startswith(_OURS) and not any(part in frame.file for part in _LIBRARY):
            return frame
    return frames[0] if frames else None


def in_kernel(pid: int) -> str:
    """What each thread of a process does in the kernel, a line each; empty where it is gone."""
    lines = []
    for thread in sorted(_threads(pid), key=int):
        folder = Path("/proc", str(pid), "task", thread)
        name, stat, wchan = (_text(folder / file) for file in ("comm", "stat", "wchan"))
        if not stat:
            continue  # it ended while we looked
        fields = stat.rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        where = wchan if wchan not in ("", "0") else "-"
        lines.append(f"  thread {thread} {name}: state {fields[0]}, in {where}, {cpu_s:.2f} s CPU")
    return "".join(f"{line}\n" for line in lines)


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
