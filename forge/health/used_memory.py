"""How much memory a job has used, kept in its directory for its later attempts.

`.forge/memory.json` holds the most that a task has had resident and that nothing but its end gives
back, and the most that was held in the innermost cgroup with a limit, which counts the workers of
loaders, too. Pages of files do not count: the tasks of a node may all have mapped the same ones. It
is written while the job trains: a task that is killed for memory has no time to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from forge.errors import Untrusted
from forge.jobdir.job_files import forge_dir, read_json, suffix, write_json
from forge.process import processes
from forge.process.memory import limited

_NAME = "memory.json"


class Used(NamedTuple):
    """Bytes of one task."""

    rss: int = 0
    """What it has resident, without pages of files."""
    cgroup: int = 0
    """What is held in its innermost cgroup that has a limit, by whichever process."""


def now() -> Used:
    """What this process uses now; 0 where nobody says (not Linux)."""
    resident = processes.status(os.getpid()).get("RssAnon", "0 kB")
    limits = limited()
    return Used(int(resident.split()[0]) * 1024, limits[0].held if limits else 0)


def note(job: Path) -> None:
    """Keep the most that this task has used; a failure costs a later check its comparison."""
    before = _of(job, None)
    most = Used(*map(max, before, now()))
    if most != before:
        with contextlib.suppress(OSError):
            write_json(_path(job, None), most._asdict())


def read(job: Path, ranks: Iterable[int]) -> int:
    """Bytes that these ranks of a job have used together on their node; 0: nobody knows."""
    found = [_of(job, rank) for rank in ranks]
    return max(sum(one.rss for one in found), max(one.cgroup for one in found))


def _of(job: Path, rank: int | None) -> Used:
    try:
        found = read_json(_path(job, rank)) or {}
        return Used(int(found.get("rss", 0)), int(found.get("cgroup", 0)))
    except (TypeError, ValueError, Untrusted):  # of another version, or of somebody else's
        return Used()


def _path(job: Path, rank: int | None) -> Path:
    return forge_dir(job) / f"{_NAME}{suffix(rank)}"
