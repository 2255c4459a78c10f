"""What this process's own cgroups say of memory: who was killed for it, and what is free.

A process that was killed for memory ends as any other that gets a SIGKILL. Only the kernel knows,
and tells it to those who may read its log; the cgroup counts for everybody, but whose process it
was it does not say. Where there is no such count (no cgroup but the root, not Linux), nobody knows.
Source: the kernel's cgroup-v2 (`memory.events`, `.max`, `.current`, `.stat`), cgroup-v1/memory
(`memory.oom_control`, `.limit_in_bytes`, `.usage_in_bytes`, `.stat`) and proc(5) (`MemAvailable`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO, _OWN, _ROOT = "/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup"
_NO_LIMIT = 2**60
"""A limit of cgroup-v1 that is none: the largest number of pages, in bytes."""


def _available_bytes(meminfo: str) -> int | None:
    """What the node could still give to processes, without swapping; None where nobody says."""
    try:
        lines = Path(meminfo).read_text().splitlines()
        pairs = dict(line.split(":", 1) for line in lines)
        return int(pairs["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def _folders(own: str, root: str) -> Iterator[tuple[Path, bool]]:
    """(its folder, whether of version 1) of each of them that may account for memory."""
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if controllers and not is_v1:
            continue
        top = Path(root, "memory") if is_v1 else Path(root)
        folder = top / path[1:]
        yield folder, is_v1
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder, is_v1


def _free(folder: Path, *, is_v1: bool) -> int | None:
    """Bytes until a limit is reached; files' cached pages go before anything is killed."""
    limit, usage = ("limit_in_bytes", "usage_in_bytes") if is_v1 else ("max", "current")
    cached = "total_inactive_file" if is_v1 else "inactive_file"
    try:
        most = int((folder / f"memory.{limit}").read_text())  # `max` is no number: no limit
        used = int((folder / f"memory.{usage}").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
    except (OSError, ValueError):
        return None
    if most >= _NO_LIMIT:
        return None
    return max(most - used + stat.get(cached, 0), 0)


def free_bytes(meminfo: str = _MEMINFO, own: str = _OWN, root: str = _ROOT) -> int | None:
    """What this process may still take: the least that the node and its cgroups leave.

    Slurm makes a cgroup for a job, and one for a step. None where nobody says.

    Args:
        meminfo: Says what the node has.
        own: Says which cgroups this process is in.
        root: Where they are mounted.
    """
    limits = (_free(folder, is_v1=is_v1) for folder, is_v1 in _folders(own, root))
    free = (_available_bytes(meminfo), *limits)
    return min((one for one in free if one is not None), default=None)


def oom_kills(own: str = _OWN, root: str = _ROOT) -> int | None:
    """Processes of this cgroup that the kernel has killed for memory; None where nobody counts.

    Args:
        own: Says which cgroups this process is in.
        root: Where they are mounted.
    """
    for folder, is_v1 in _folders(own, root):
        count = _count(folder / ("memory.oom_control" if is_v1 else "memory.events"))
        if count is not None or not is_v1:  # those above it count what others have, too
            return count
    return None


def _count(file: Path) -> int | None:
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
        return int(pairs["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
