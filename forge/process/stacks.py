"""Collect the stacks of a process that hangs.

    supervisor   starts the task with page.environ (`progress.py`); gather(page.fd, pids)
    task         register(os.environ)

On a signal, faulthandler writes the stack of the main thread; its handler is in C, so it also runs
while a C call holds the GIL. It appends to the shared memory of the heartbeat page, since the
process can be waiting for a disk. For code outside Python, /proc shows what each thread waits for.
On another signal, a process that is about to be killed writes the stacks of all Python threads to
its output; reading running threads can crash it. Only on Linux.
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

# Real-time signals, which a policy cannot name.
SIGNAL: int = signal.SIGRTMAX - 3 if sys.platform == "linux" else 0
ALL_SIGNAL: int = signal.SIGRTMAX - 2 if sys.platform == "linux" else 0
_WRITES_S = 1.0
"""Timeout in seconds for a process to begin writing; in the kernel's state D it never does."""
_ALL_S = 5.0
"""Timeout in seconds for all processes of a task."""
_MOST_BYTES = 2**20
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (_OURS, "/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
_is_registered = False
"""Whether this process, or the one it was forked from, has registered the handlers."""


def register(environ: Mapping[str, str]) -> None:
    """In a task: write its stack on a signal, if its supervisor has created a heartbeat page.

    Args:
        environ: The environment of this process.
    """
    global _is_registered
    path = environ.get(PROGRESS, "")
    if not path or _is_registered:
        return
    import faulthandler

    try:  # never closed: the handler writes to it
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the supervisor has ended
        return
    faulthandler.register(SIGNAL, file=fd, all_threads=False)
    _is_registered = True


def show_all(pids: Iterable[int], reader: int) -> None:
    """Make processes write the stacks of all threads to their output, before they are killed.

    Args:
        pids: The processes.
        reader: A descriptor that becomes readable once one of them has ended.
    """
    asked = [pid for pid in pids if ALL_SIGNAL and processes.catches(pid, ALL_SIGNAL)]
    for pid in asked:
        processes.send(pid, ALL_SIGNAL)
    if asked:
        select.select([reader], [], [], _WRITES_S)


def gather(fd: int, pids: Iterable[int]) -> Generator[None, None, dict[int, str]]:
    """Make processes write their stacks, one after the other; yields while it waits.

    Args:
        fd: The descriptor of the heartbeat page to which they append; -1: there is none.
        pids: The processes, most important first, since there is a timeout for all together.
    Returns:
        pid -> faulthandler's output; empty for a process that does not react.
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
    """Wait until another process has written to a file and it stops growing; yields meanwhile.

    Args:
        fd: The file's descriptor.
        begin: The file's size before.
        begins_s: Timeout in seconds for the first byte.
        ends_s: Timeout in seconds for all bytes.
    Returns:
        Number of bytes written.
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
    """Whether a process has our page open; otherwise it uses the signal for something else."""
    folder = f"/proc/{pid}/fd"
    try:  # compare the unique names: a stat of its files could block on a disk
        name = os.readlink(f"/proc/self/fd/{fd}")
        return any(os.readlink(f"{folder}/{one}") == name for one in os.listdir(folder))
    except OSError:  # the process has ended, or closed a file meanwhile
        return False


def main_frames(text: str) -> list[str]:
    """The stack of a process's main thread, innermost frame first; empty if it is not shown.

    Args:
        text: faulthandler's output, in which the main thread is last.
    """
    frames: list[str] = []
    for line in text.splitlines():
        if line == "...":  # truncated, so the main thread, which is last, is missing
            return []
        if line.startswith(("Thread ", "Current thread ", "Stack (")):
            frames = []
        elif line.startswith('  File "'):
            file, _, where = line.removeprefix('  File "').rpartition('", line ')
            frames.append(f"{file}:{where}")
    return frames


def own_frame(frames: Sequence[str]) -> str:
    """The innermost frame in the user's code, else the innermost frame."""
    own = (one for one in frames if not any(part in one for part in _NOT_THE_USERS))
    return next(own, frames[0] if frames else "")


def in_kernel(pid: int) -> str:
    """The kernel state of each thread of a process, one line each; empty if it has ended."""
    lines = []
    with contextlib.suppress(OSError):  # the process ended meanwhile
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            folder = Path("/proc", str(pid), "task", thread)
            name, stat, wchan = (_text(folder / file) for file in ("comm", "stat", "wchan"))
            if not stat:
                continue  # the thread has ended
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
