"""The processes that descend from this one, and how they are ended.

Processes are found by their parent and ended by pidfd where the kernel has it, so that a number
that was given to somebody else's process meanwhile is never hit. Source: pidfd_open(2), proc(5).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path


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
    spared = _resource_tracker_pid()
    return [pid for pid in found if pid != spared]


def _resource_tracker_pid() -> int | None:
    """The tracker of multiprocessing ends with us, and until then removes leaked semaphores."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    return getattr(tracker, "_pid", None)


def send(pid: int, signum: int) -> bool:
    """Signal one process; False where it is gone or not ours."""
    try:
        if hasattr(os, "pidfd_open"):
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signum)
            finally:
                os.close(handle)
        else:
            os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until the processes ended; return those that did not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if _is_alive(pid)]
    while left and (remaining := deadline - time.monotonic()) > 0:
        _wait_for_one(left[0], remaining)
        left = [pid for pid in left if _is_alive(pid)]
    return left


def _wait_for_one(pid: int, timeout_s: float) -> None:
    if not hasattr(os, "pidfd_open"):
        time.sleep(min(0.02, timeout_s))  # no event to wait for on this platform
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(handle)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        if sys.platform.startswith("linux"):
            return False
        return pid in _parents()
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end_descendants(grace_s: float = 1.0) -> int:
    """End every descendant: SIGTERM, then after `grace_s` seconds SIGKILL.

    Returns:
        How many processes were ended by SIGKILL.
    """
    first = descendants()
    for pid in first:
        send(pid, signal.SIGTERM)
    if first and grace_s > 0:
        wait_gone(first, grace_s)
    return kill_descendants()


def kill_descendants() -> int:
    """SIGKILL every descendant, those that are born meanwhile too."""
    killed = 0
    for _ in range(20):  # a pool that restarts its workers is outrun, a fork bomb is not
        left = descendants()
        if not left:
            break
        killed += sum(send(pid, signal.SIGKILL) for pid in left)
        wait_gone(left, 1.0)
    return killed
