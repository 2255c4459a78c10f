"""Whether the kernel has killed for memory, by the count of this process's own cgroup.

A process that was killed for memory ends as any other that gets a SIGKILL. Only the kernel knows,
and tells it to those who may read its log; the cgroup counts for everybody, but whose process it
was it does not say. Where there is no such count (no cgroup but the root, not Linux), nobody knows.
Source: the kernel's cgroup-v2 (`memory.events`) and cgroup-v1/memory (`memory.oom_control`).
"""

from __future__ import annotations

from pathlib import Path


def oom_kills(own: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int | None:
    """Processes of this cgroup that the kernel has killed for memory; None where nobody counts.

    Args:
        own: Says which cgroups this process is in.
        root: Where they are mounted.
    """
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            candidates = [Path(root, path[1:], "memory.events")]
        elif "memory" in controllers.split(","):
            folder = Path(root, "memory")
            # In a container that sees its own cgroup alone, that one is mounted at the top.
            candidates = [one / "memory.oom_control" for one in (folder / path[1:], folder)]
        else:
            continue
        for file in candidates:
            count = _count(file)
            if count is not None:
                return count
    return None


def _count(file: Path) -> int | None:
    try:
        pairs = dict(line.split() for line in file.read_text().splitlines())
        return int(pairs["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
