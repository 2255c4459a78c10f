"""The verdict: why the training process ended, for whoever started it.

A file, because an exit code does not survive every launcher, and none tells a crash from a kill.
No file means that the process did not get to say: a forced exit, a crash, a SIGKILL.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge import messages
from forge.errors import Reason
from forge.jobdir import spawned
from forge.jobdir.job_files import VERDICT, forge_dir, read_json, suffix, write_json


@dataclass(frozen=True)
class Verdict:
    """What a process says of its own end."""

    reason: Reason
    text: str
    """The same for people; it may say more."""
    exit_code: int
    step: int | None = None
    """Steps done; None where it is main that ended, and no Run."""
    checkpoints: str = ""
    """Directory of the Run's checkpoints."""
    pid: int = field(default_factory=os.getpid)
    owner: str = field(default_factory=spawned.owner)
    """See `spawned.owner`."""
    time: float = field(default_factory=time.time)
    """Unix time."""


def write(job_dir: Path, verdict: Verdict) -> None:
    """Leave the verdict of this process; a full disk is logged and keeps nobody from leaving.

    Of a Run: where another process of the attempt has failed, that verdict stands.
    """
    if verdict.checkpoints and of_child(job_dir) != 0:
        return
    content = asdict(verdict) | {"reason": verdict.reason.name}
    try:
        write_json(_path(job_dir), content)
    except OSError as error:
        messages.warn(f"The verdict ({verdict.text}) could not be written: {error}")


def read(job_dir: Path, rank: int | None = None) -> Verdict | None:
    """The verdict of a rank (None: of this process's); None where there is none.

    One of another version of forge's, or one that somebody has edited, is none.
    """
    found: dict[str, Any] | None = read_json(_path(job_dir, rank))
    if found is None or found.get("reason") not in Reason.__members__:
        return None
    try:
        return Verdict(**found | {"reason": Reason[found["reason"]]})
    except TypeError:
        return None


def of_child(job_dir: Path) -> int:
    """The exit code that a child of this process, or a sibling, left in this attempt; else 0."""
    found = read(job_dir)
    is_other = found is not None and found.pid != os.getpid() and found.owner == spawned.owner()
    return found.exit_code if found is not None and is_other else 0


def clear(job_dir: Path, checkpoint_dir: Path, before: float) -> None:
    """Remove the verdict of an earlier attempt, which is older than that unix time.

    That of another Run of this attempt stays: one that failed in a process of its own.
    """
    found = read(job_dir)
    if found is not None and found.checkpoints != str(checkpoint_dir) and of_child(job_dir) != 0:
        return
    if found is None or found.time < before:
        _path(job_dir).unlink(missing_ok=True)


def _path(job_dir: Path, rank: int | None = None) -> Path:
    return forge_dir(job_dir) / f"{VERDICT}{suffix(rank)}"
