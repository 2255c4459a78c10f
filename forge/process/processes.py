"""Finding and ending the descendants of this process.

Processes are found by their parent and signalled by pidfd if the kernel has it, so that a reused
pid is never hit. Source: pidfd_open(2), proc(5).
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forge.compat import of_stdlib
from forge.jobdir.job_files import TOKEN

_GRACE_S = 1.0
_LOOK_S = 0.005


def variable(pid: int, name: str) -> str | None:
    """A variable in a process's initial environment; None if unset. Only on Linux."""
    try:
        environment = Path("/proc", str(pid), "environ").read_bytes()
    except OSError:
        return None  # the process ended, or belongs to another user
    _, is_set, rest = (b"\0" + environment).partition(f"\0{name}=".encode())
    return rest.partition(b"\0")[0].decode(errors="replace") if is_set else None


def marked(name: str, value: str) -> list[int]:
    """Every other live process that was started with `name=value`. Only on Linux.

    This also finds processes that are no longer descendants: daemons, and orphans.
    """
    entries = os.listdir("/proc") if sys.platform.startswith("linux") else ()
    pids = [int(entry) for entry in entries if entry.isdigit() and int(entry) != os.getpid()]
    return [pid for pid in pids if variable(pid, name) == value]


def _parents() -> dict[int, int]:
    """pid -> parent's pid, for every live process that is not a zombie."""
    found: dict[int, int] = {}
    if sys.platform.startswith("linux"):
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/stat", "rb", buffering=0) as file:
                        stat = file.read(4096)
                except OSError:
                    continue  # it ended meanwhile
                state, parent = stat.rpartition(b")")[2].split()[:2]
                if state not in b"ZX":
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
    """Every live descendant of `root` (default: this process), parents before children."""
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
    spared = of_stdlib.resource_tracker_pid()  # it ends after us, and removes our semaphores
    return [pid for pid in found if pid != spared]


def send(pid: int, signum: int, *, only_if: Callable[[], bool] = lambda: True) -> bool:
    """Signal one process; False if it has ended, is not ours, or is not the one of `only_if`."""
    handle = open_pidfd(pid)  # before the check, so that a later process never gets the signal
    try:
        if not only_if():
            return False
        if handle is not None:
            signal.pidfd_send_signal(handle, signum)
        else:
            os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if not supported."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:  # the process has ended, or the kernel is older than 5.3
        return None


@contextmanager
def block_signals() -> Iterator[None]:
    """Processes that are started inside this block do not receive TERM, INT, HUP, USR1 and USR2.

    Slurm signals every process of a step. Start helper programs that must survive such a signal
    (`subprocess`, multiprocessing with `spawn`, a logger's service) inside this block; forge ends
    them when the job stops. Children that are forked inside a Run (`os.fork`, multiprocessing with
    `fork`, a DataLoader's workers by default) do not need it, since forge handles their signals.
    """
    _end_deaf_children_at_exit()
    stopping = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        with of_stdlib.tracker_leaves_mask():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _end_deaf_children_at_exit() -> None:
    import multiprocessing.util  # registers what has to come after this

    assert multiprocessing.util
    atexit.register(_end_deaf_children)


def _end_deaf_children() -> None:
    """Kill daemon processes that block SIGTERM: Python would send it at exit, and wait for them."""
    import multiprocessing

    for child in multiprocessing.active_children():
        blocks = _is_in(["SigBlk"], status(child.pid or 0), signal.SIGTERM)
        if not (child.daemon and blocks):
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's would raise an error
        child.kill()


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/<pid>/status; empty if the file does not exist."""
    try:
        text = Path("/proc", str(pid), "status").read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def is_suspended(pid: int) -> bool:
    """Whether the process is stopped, or runs under a debugger. False if not on Linux."""
    found = status(pid)
    return found.get("State", "")[:1] in ("T", "t") or found.get("TracerPid", "0") != "0"


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal. False if not on Linux."""
    return _is_in(["SigCgt"], status(pid), signum)


def is_ended_by(pid: int, signum: int) -> bool:
    """Whether the process neither handles, ignores nor blocks the signal. False if not on Linux."""
    found = status(pid)  # read once: the process can end at any moment
    return bool(found) and not _is_in(["SigCgt", "SigIgn", "SigBlk"], found, signum)


def is_pending(pid: int, signum: int) -> bool:
    """Whether no thread of the process has taken the signal yet. False if not on Linux."""
    return _is_in(["ShdPnd"], status(pid), signum)


def _is_in(fields: list[str], found: dict[str, str], signum: int) -> bool:
    """Whether one of these fields of a process's status has the signal."""
    return any(int(found.get(field, "0"), 16) >> (signum - 1) & 1 for field in fields)


def is_resource_tracker(pid: int) -> bool:
    """Whether it is multiprocessing's helper that removes leaked shared memory."""
    return "multiprocessing.resource_tracker" in command(pid)


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        parts = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(part.decode(errors="replace") for part in parts if part)


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until the processes end; return those still alive after `timeout_s` seconds."""
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
    """End every descendant: SIGTERM, and SIGKILL if it is alive a second later.

    Args:
        job: The token of this job; None if there is none.
        save_s: Seconds for descendants with the token of another job to save: jobs of a sweep that
            main has started inside this one.
    """
    first = descendants()
    for pid in first:
        send(pid, signal.SIGTERM)
    left = wait_gone(first, _GRACE_S)
    wait_gone([pid for pid in left if variable(pid, TOKEN) not in (None, job)], save_s)
    kill_descendants()


def kill_descendants() -> None:
    """SIGKILL every descendant, including those that are started meanwhile."""
    for _ in range(20):  # enough for a pool that restarts its workers, not for a fork bomb
        left = descendants()
        if not left:
            return
        # Last the resource trackers, which remove the shared memory of the others.
        trackers = [pid for pid in left if is_resource_tracker(pid)]
        others = [pid for pid in left if pid not in trackers]
        for pid in others or trackers:
            send(pid, signal.SIGKILL)
        wait_gone(others or trackers, 1.0)
        wait_gone(trackers, 1.0)
