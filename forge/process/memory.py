"""Memory figures of this process's cgroups: out-of-memory kills, and free memory.

A process killed for lack of memory looks like any process that got a SIGKILL. The kernel log names
it, but needs privileges; the cgroup counts such kills, but does not name the process. Without such
a count (only the root cgroup, or not Linux) the cause is unknown.
Source: the kernel's cgroup-v2 (`memory.events`, `.max`, `.current`, `.stat`), cgroup-v1/memory
(`memory.oom_control`, `.limit_in_bytes`, `.usage_in_bytes`, `.stat`) and proc(5) (`MemAvailable`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMINFO, OWN_CGROUPS, CGROUPS = "/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup"
_NO_LIMIT = 2**60
"""cgroup-v1 shows "no limit" as a limit of at least this: the largest number of pages, in bytes."""


def _of_node(name: str) -> int | None:
    """A line of /proc/meminfo in bytes; None if unknown."""
    try:
        lines = Path(MEMINFO).read_text().splitlines()
        pairs = dict(line.split(":", 1) for line in lines)
        return int(pairs[name].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _folders() -> Iterator[tuple[Path, bool]]:
    """(folder, whether cgroup-v1) for each cgroup of this process that can account for memory."""
    try:
        lines = Path(OWN_CGROUPS).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        top = Path(CGROUPS, "memory") if is_v1 else Path(CGROUPS)
        folder = top / path[1:]
        yield folder, is_v1
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder, is_v1


def _limit(folder: Path, *, is_v1: bool) -> int | None:
    """The limit of a cgroup in bytes; None if it has none."""
    try:  # "max" (no limit) is a ValueError
        most = int((folder / f"memory.{'limit_in_bytes' if is_v1 else 'max'}").read_text())
    except (OSError, ValueError):
        return None
    return most if most < _NO_LIMIT else None


def limit_bytes() -> int | None:
    """Memory that this process and its siblings can use at most; None if nothing is known."""
    limits = (_limit(folder, is_v1=is_v1) for folder, is_v1 in _folders())
    most = (_of_node("MemTotal"), *limits)
    return min((one for one in most if one is not None), default=None)


def _free(folder: Path, *, is_v1: bool) -> int | None:
    """Bytes until the limit; cached file pages count as free, since the kernel drops them first."""
    most, usage = _limit(folder, is_v1=is_v1), "usage_in_bytes" if is_v1 else "current"
    cached = "total_inactive_file" if is_v1 else "inactive_file"
    if most is None:
        return None
    try:
        used = int((folder / f"memory.{usage}").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
    except (OSError, ValueError):
        return None
    return max(most - used + stat.get(cached, 0), 0)


def free_bytes() -> int | None:
    """Memory that this process can still use: the minimum over the node and its cgroups.

    Slurm creates a cgroup for each job and each step. None if nothing is known.
    """
    limits = (_free(folder, is_v1=is_v1) for folder, is_v1 in _folders())
    free = (_of_node("MemAvailable"), *limits)
    return min((one for one in free if one is not None), default=None)


def oom_kills() -> int | None:
    """Number of out-of-memory kills in this process's cgroup; None if it is not counted."""
    for folder, is_v1 in _folders():
        count = _count(folder / ("memory.oom_control" if is_v1 else "memory.events"))
        if count is not None or not is_v1:  # parent cgroups also count other processes
            return count
    return None


def _count(file: Path) -> int | None:
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
        return int(pairs["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
