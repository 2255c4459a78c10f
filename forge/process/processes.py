"""The processes that descend from this one, and how they are ended.

Processes are found by their parent and ended by pidfd where the kernel has it, so that a number
that was given to somebody else's process meanwhile is never hit. Source: pidfd_open(2), proc(5).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from forge.compat import of_stdlib
from forge.jobdir.job_files import TOKEN

_GRACE_S = 1.0
_LOOK_S = 0.005
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_SET_PDEATHSIG = 1


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Linux; elsewhere nothing."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int | None = None) -> None:
    """Have the kernel signal this process when its parent ends. Linux; elsewhere nothing.

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


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with; None where unset. Linux."""
    try:
        environment = Path("/proc", str(pid), "environ").read_bytes()
    except OSError:
        return None  # it ended, or is somebody else's
    _, is_set, rest = (b"\0" + environment).partition(f"\0{name}=".encode())
    return rest.partition(b"\0")[0].decode(errors="replace") if is_set else None


def marked(name: str, value: str) -> list[int]:
    """Every live process but this one that was started with `name=value`. Linux.

    It finds what has left the family: a daemon, or the orphans of a parent that was killed.
    """
    entries = os.listdir("/proc") if sys.platform.startswith("linux") else ()
    pids = [int(entry) for entry in entries if entry.isdigit() and int(entry) != os.getpid()]
    return [pid for pid in pids if variable(pid, name) == value]


def _parents() -> dict[int, int]:
    """pid -> parent's pid, of every live process (zombies left out)."""
    found: dict[int, int] = {}
    if sys.platform.startswith("linux"):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    stat = Path("/proc", entry, "stat").read_text(errors="replace")
                except OSError:
                    continue  # it ended while we looked
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    found[int(entry)] = int(parent)
        return found
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
    )
    for line in listing.stdout.splitlines():
        pid, parent, state = line.split(None, 2)
        if not state.startswith("Z"):
            found[int(pid)] = int(parent)
    return found


def descendants(root: int | None = None) -> list[int]:
    """Every live process below `root` (this process by default), parents before children."""
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = [os.getpid() if root is None else root]
    while frontier:
        for child in children.get(frontier.pop(), ()):
            found.append(child)
            frontier.append(child)
    spared = of_stdlib.resource_tracker_pid()  # ends with us; until then it removes semaphores
    return [pid for pid in found if pid != spared]


def send(pid: int, signum: int) -> bool:
    """Signal one process; False where it is gone or not ours."""
    handle = open_pidfd(pid)
    try:
        if handle is not None:
            try:
                signal.pidfd_send_signal(handle, signum)
            finally:
                os.close(handle)
        else:
            os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there are none."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:  # it is gone, or the kernel is older than 5.3
        return None


def listen(numbers: Iterable[int]) -> int:
    """Take signals in through a descriptor, which can be polled, instead of by being interrupted.

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
    """The numbers of the signals that have come in since the last call."""
    try:
        return os.read(reader, 512)
    except BlockingIOError:
        return b""


def fork() -> int:
    """As os.fork, but the child begins with every signal blocked.

    Until it has handlers of its own it has its parent's, and would tell the parent, through the
    descriptor of `listen`, of signals that are not the parent's.
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


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/<pid>/status; empty where there are none."""
    try:
        text = Path("/proc", str(pid), "status").read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def is_suspended(pid: int) -> bool:
    """Whether the process is stopped, or runs under a debugger. Linux; elsewhere False."""
    found = status(pid)
    return found.get("State", "")[:1] in ("T", "t") or found.get("TracerPid", "0") != "0"


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal. Linux; elsewhere False."""
    return bool(int(status(pid).get("SigCgt", "0"), 16) >> (signum - 1) & 1)


def is_resource_tracker(pid: int) -> bool:
    """Whether it is multiprocessing's helper that removes shared memory once its owner is gone."""
    return "multiprocessing.resource_tracker" in command(pid)


def command(pid: int) -> str:
    """What the process was started with; empty where it is gone."""
    try:
        parts = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(part.decode(errors="replace") for part in parts if part)


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until the processes ended; return those that did not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if _is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left = [pid for pid in left if _is_alive(pid)]
    return left


def _is_alive(pid: int) -> bool:
    if sys.platform.startswith("linux"):
        return status(pid).get("State", "X")[:1] not in "ZX"
    return pid in _parents()


def end_descendants(job: str | None, save_s: float) -> None:
    """End every descendant: SIGTERM, and SIGKILL where that has not ended them in a second.

    Args:
        job: The mark of the job that they belong to; None: they belong to none.
        save_s: Seconds for those with the mark of another job: a sweep that main has started in
            this one, whose jobs save first.
    """
    first = descendants()
    for pid in first:
        send(pid, signal.SIGTERM)
    left = wait_gone(first, _GRACE_S)
    wait_gone([pid for pid in left if variable(pid, TOKEN) not in (None, job)], save_s)
    kill_descendants()


def kill_descendants() -> None:
    """SIGKILL every descendant, those that are born meanwhile too."""
    for _ in range(20):  # a pool that restarts its workers is outrun, a fork bomb is not
        left = descendants()
        if not left:
            return
        # A tracker of multiprocessing removes what the others shared, once they are gone.
        trackers = [pid for pid in left if is_resource_tracker(pid)]
        others = [pid for pid in left if pid not in trackers]
        for pid in others or trackers:
            send(pid, signal.SIGKILL)
        wait_gone(others or trackers, 1.0)
        wait_gone(trackers, 1.0)
