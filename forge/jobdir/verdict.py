"""The verdict: why the training process ended, for whoever started it.

A file, because an exit code does not survive every launcher, and none tells a crash from a kill.
No file means that the process did not get to say: a forced exit, a crash, a SIGKILL.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from forge import messages
from forge.jobdir import spawned
from forge.jobdir.job_files import VERDICT, forge_dir, read_json, suffix, write_json


def write(job_dir: Path, checkpoint_dir: Path, reason: str, step: int, code: int) -> None:
    """Leave the verdict of this attempt; where another process of it has failed, that stands."""
    if of_child(job_dir) != 0:
        return
    content = {
        "reason": reason,
        "step": step,
        "exit_code": int(code),
        "checkpoints": str(checkpoint_dir),
        "pid": os.getpid(),
        "owner": spawned.owner(),
        "time": time.time(),
    }
    try:
        write_json(forge_dir(job_dir) / f"{VERDICT}{suffix()}", content)
    except OSError as error:  # a full disk must not keep a job from leaving in order
        messages.warn(f"The verdict ({reason}) could not be written: {error}")


def of_child(job_dir: Path) -> int:
    """The exit code that a child of this process, or a sibling, left in this attempt; else 0."""
    found = read_json(forge_dir(job_dir) / f"{VERDICT}{suffix()}") or {}
    is_other = found.get("pid") != os.getpid() and found.get("owner") == spawned.owner()
    return int(found["exit_code"]) if is_other else 0


def clear(job_dir: Path, checkpoint_dir: Path, before: float) -> None:
    """Remove the verdict of an earlier attempt, which is older than that unix time.

    That of another Run of this attempt stays: one that failed in a process of its own.
    """
    path = forge_dir(job_dir) / f"{VERDICT}{suffix()}"
    found = read_json(path) or {}
    is_of_another_run = of_child(job_dir) != 0 and found.get("checkpoints") != str(checkpoint_dir)
    if found.get("time", 0.0) < before and not is_of_another_run:
        path.unlink(missing_ok=True)
