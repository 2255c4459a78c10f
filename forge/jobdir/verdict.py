"""The verdict: a file in which the training process records why it ended.

Some launchers lose the exit code, and an exit code cannot distinguish a crash from a kill. If there
is no file, the process could not write one: a forced exit, a crash, or SIGKILL.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge import messages
from forge.errors import Reason
from forge.jobdir.job_files import VERDICT, forge_dir, read_json, suffix, write_json


@dataclass(frozen=True)
class Verdict:
    """The reason of a process's end, as the process itself states it."""

    reason: Reason
    text: str
    """The reason for people, with details."""
    exit_code: int
    step: int | None = None
    """Steps done; None if main ended outside a Run."""
    frame: str = ""
    """Where an exception was raised, in the user's code: `train.py:23 in main`."""
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)
    """Unix time."""


def write(job_dir: Path, verdict: Verdict) -> None:
    """Write the verdict of this process; a full disk is logged and does not delay the exit."""
    content = asdict(verdict) | {"reason": verdict.reason.name}
    try:
        write_json(_path(job_dir), content)
    except OSError as error:
        messages.warn(f"Could not record why this process ends ({verdict.text}): {error}")


def read(job_dir: Path, rank: int | None = None) -> Verdict | None:
    """The verdict of a rank (None: this process's rank), or None.

    A verdict of another version of forge, or one that was edited, does not count.
    """
    found: dict[str, Any] | None = read_json(_path(job_dir, rank))
    if found is None or found.get("reason") not in Reason.__members__:
        return None
    try:
        return Verdict(**found | {"reason": Reason[found["reason"]]})
    except TypeError:
        return None


def clear(job_dir: Path, before: float) -> None:
    """Remove the verdict of an earlier attempt, which is older than the Unix time `before`."""
    found = read(job_dir)
    if found is None or found.time < before:
        _path(job_dir).unlink(missing_ok=True)


def _path(job_dir: Path, rank: int | None = None) -> Path:
    return forge_dir(job_dir) / f"{VERDICT}{suffix(rank)}"
