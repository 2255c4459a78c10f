"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

PROC, GROUPS = "/proc", "/sys/fs/cgroup"
"""Where the kernel tells."""

_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes about 2^63 for none."""


def available_bytes() -> int | None:
    """Bytes that can be had without swapping or being killed; None where nobody says.

    The least of the machine's MemAvailable and what each memory cgroup above this process leaves
    (Slurm makes one for a job and one for a step). Pages of files count as free in both.
    Source: Documentation/admin-guide/cgroup-v2.rst of Linux.
    """
    found = [*_machine(), *_groups()]
    return min(found) if found else None


def _machine() -> list[int]:
    try:
        lines = Path(PROC, "meminfo").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]


def _groups() -> list[int]:
    try:
        lines = Path(PROC, "self", "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, root = ("memory.max", "memory.current", "inactive_file"), Path(GROUPS)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = Path(GROUPS, "memory")
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            left = _left_in(group, *names)
            if left is not None:
                found.append(left)
            if group == root:
                break
    return found


def _left_in(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= _NO_LIMIT:
            return None
        used = int((group / usage_name).read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # the root has no limit, and inside a container much is not to be seen
    return max(0, int(limit) - used + int(counters.get(cache_name, 0)))
