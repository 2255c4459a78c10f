"""Checks of the node that need neither its GPUs nor another rank."""

from __future__ import annotations

import os
from pathlib import Path

from forge.health import used_memory
from forge.health.check import Context, Finding
from forge.process import memory as cgroups

_SHM = "/dev/shm"
_GIB = 2**30
_ZOMBIES = 100
_BETWEEN_S = 1.0
"""Seconds between two looks at processes that wait for a device: most do so for milliseconds."""


def shm(context: Context) -> Finding | None:
    """Whether the workers of loaders have room for the batches that they hand over."""
    if not os.path.isdir(_SHM):
        return None
    found = os.statvfs(_SHM)
    if not found.f_blocks:  # a tmpfs without a limit
        return None
    free_gib = found.f_bavail * found.f_frsize / _GIB
    return Finding(
        f"{free_gib:.2f} GiB free in {_SHM}",
        is_failed=context.is_below(free_gib),
        remedy="Give the container more (`--shm-size`, `--ipc=host`), or remove what lies there.",
    )


def memory(context: Context) -> Finding | None:
    """Whether there is as much memory as the job's tasks on this node have used before.

    What its processes hold already counts as free: they have it.
    """
    ranks = range(context.ranks.rank, context.ranks.rank + context.local_size)
    before = used_memory.read(context.job, ranks)
    available = cgroups.available_bytes()
    if not before or available is None:
        return None
    limits = cgroups.limited()
    now = max(used_memory.now().rss * context.local_size, limits[0].held if limits else 0)
    free = min([available, *(one.free for one in limits)]) + now
    return Finding(
        f"{free / _GIB:.2f} GiB of memory for the job, which has used {before / _GIB:.2f} before",
        is_failed=context.is_below(free / before),
        remedy="Look at who else runs there, or ask for more memory (`mem_gb`).",
    )


def processes(context: Context) -> Finding | None:
    """How many processes wait for a device that does not answer, or are collected by nobody.

    Of zombies a hundred times as many pass: each holds a number and nothing else,
    and a container without an init keeps those of healthy programs.
    """
    if not os.path.isdir("/proc/self"):
        return None
    states = _states()
    zombies = [pid for pid, state in states.items() if state == "Z"]
    waiting = [pid for pid, state in states.items() if state == "D"]
    if context.is_above(len(waiting)):
        context.stopped.wait(_BETWEEN_S)
        again = _states()
        waiting = [pid for pid in waiting if again.get(pid) == "D"]
    return Finding(
        f"{_count(waiting, 'processes wait for a device (state D)')}, {_count(zombies, 'zombies')}",
        is_failed=context.is_above(max(len(waiting), len(zombies) / _ZOMBIES)),
        remedy="`ps -eo pid,ppid,stat,wchan:20,cmd` shows whose they are; often a disk hangs.",
    )


def _count(pids: list[int], what: str) -> str:
    named = f" (pid {', '.join(map(str, pids[:3]))}{', …' if len(pids) > 3 else ''})"
    return f"{len(pids)} {what}{named if pids else ''}"


def _states() -> dict[int, str]:
    """pid -> the letter of its state, of every process that is seen from here."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            found[int(entry)] = stat.rpartition(b")")[2][1:2].decode()
    return found
