"""What the threads of a process stand in, without its help: it may not answer any more.

    supervisor   starts the task with page.environ (`progress.py`); gather(page.fd, pids)
    task         register(os.environ)

By a signal faulthandler writes the stack of the main thread; its handler is C, so it runs where a
call holds the interpreter's lock, too. It writes behind the task's page of progress, in memory: a
disk may be what the process waits for. What hangs outside Python is shown by the kernel, thread by
thread. By another signal a process that is to be killed writes those of all its Python threads into
its output: they are read while they run, which can crash it. Linux; elsewhere nothing is gathered.
Source: proc(5), faulthandler.register.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

from forge.jobdir.job_files import PROGRESS
from forge.process import processes

# Not among those that a policy can name.
SIGNAL: int = signal.SIGRTMAX - 3 if sys.platform == "linux" else 0
ALL_SIGNAL: int = signal.SIGRTMAX - 2 if sys.platform == "linux" else 0
_WRITES_S = 1.0
"""Seconds until a process has begun to write; one in the kernel's state D never does."""
_ALL_S = 5.0
"""Seconds for all processes of a task."""
_MOST_BYTES = 2**20
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (_OURS, "/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
_is_registered = False
"""In this process, or in the one that it was forked from."""


def register(environ: Mapping[str, str]) -> None:
    """In a task: have its stack written on a signal, where a supervisor has made a place for it.

    Args:
        environ: The environment of this process.
    """
    global _is_registered
    path = environ.get(PROGRESS, "")
    if not path or _is_registered:
        return
    import faulthandler

    try:  # stays open as long as the process lives: the handler writes to it
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the supervisor is gone
        return
    faulthandler.register(SIGNAL, file=fd, all_threads=False)
    _is_registered = True


def show_all(pids: Iterable[int], reader: int) -> None:
    """Have processes that are to be killed write the stacks of all threads into their output.

    Args:
        pids: Which.
        reader: A descriptor that can be read once one of them has ended.
    """
    asked = [pid for pid in pids if ALL_SIGNAL and processes.catches(pid, ALL_SIGNAL)]
    for pid in asked:
        processes.send(pid, ALL_SIGNAL)
    if asked:
        select.select([reader], [], [], _WRITES_S)


def gather(fd: int, pids: Iterable[int]) -> Generator[None, None, dict[int, str]]:
    """Have processes write their stacks, one after the other; yields while it waits for them.

    Args:
        fd: Of the page that they write behind; -1: there is none.
        pids: The most important first: there are seconds for all of them.
    Returns:
        pid -> what faulthandler wrote; empty for a process that does not react.
    """
    found: dict[int, str] = {}
    deadline = time.monotonic() + _ALL_S
    for pid in pids:
        found[pid] = ""
        if not (_is_open_in(pid, fd) and processes.catches(pid, SIGNAL)):
            continue
        begin, left_s = os.fstat(fd).st_size, deadline - time.monotonic()
        if processes.send(pid, SIGNAL):
            size = yield from settled(fd, begin, _WRITES_S, left_s)
            found[pid] = os.pread(fd, min(size, _MOST_BYTES), begin).decode(errors="replace")
    return found


def settled(fd: int, begin: int, begins_s: float, ends_s: float) -> Generator[None, None, int]:
    """Until what somebody else writes is there, and grows no more; yields while it waits.

    Args:
        fd: What they write to.
        begin: Where in it.
        begins_s: Seconds until there is anything.
        ends_s: Seconds for all of it.
    Returns:
        How many bytes it is.
    """
    began, found = time.monotonic(), 0
    while time.monotonic() - began < (ends_s if found else min(begins_s, ends_s)):
        yield
        before = found
        found = os.fstat(fd).st_size - begin
        if 0 < found <= before:
            break
    return found


def _is_open_in(pid: int, fd: int) -> bool:
    """Whether it is ours that a process writes to: a handler of its own is not for this."""
    folder = f"/proc/{pid}/fd"
    try:  # by name, which no other memory has: to ask for a file's number may wait for a disk
        name = os.readlink(f"/proc/self/fd/{fd}")
        return any(os.readlink(f"{folder}/{one}") == name for one in os.listdir(folder))
    except OSError:  # it is gone, or has closed one meanwhile
        return False


def main_frames(text: str) -> list[str]:
    """The stack of a process's main thread, innermost first; empty where it is not shown.

    Args:
        text: What faulthandler has written of it: the main thread is the last of all threads.
    """
    frames: list[str] = []
    for line in text.splitlines():
        if line == "...":  # there are more threads than it shows, and the main one is the last
            return []
        if line.startswith(("Thread ", "Current thread ", "Stack (")):
            frames = []
        elif line.startswith('  File "'):
            file, _, where = line.removeprefix('  File "').rpartition('", line ')
            frames.append(f"{file}:{where}")
    return frames


def own_frame(frames: Sequence[str]) -> str:
    """The innermost frame of a stack that is of the user's own code, else the innermost one."""
    own = (one for one in frames if not any(part in one for part in _NOT_THE_USERS))
    return next(own, frames[0] if frames else "")


def in_kernel(pid: int) -> str:
    """What each thread of a process does in the kernel, a line each; empty where it is gone."""
    lines = []
    with contextlib.suppress(OSError):  # it ends while we look
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            folder = Path("/proc", str(pid), "task", thread)
            name, stat, wchan = (_text(folder / file) for file in ("comm", "stat", "wchan"))
            if not stat:
                continue  # the thread has
            fields = stat.rpartition(")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            where = wchan if wchan not in ("", "0") else "-"
            state = f"state {fields[0]}, in {where}, {cpu_s:.2f} s CPU"
            lines.append(f"  thread {thread} {name}: {state}\n")
    return "".join(lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
