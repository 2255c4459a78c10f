"""The verdict: why the training process ended, for whoever started it.

A file, because an exit code does not survive every launcher, and none tells a crash from a kill.
No file means that the process did not get to say: a forced exit, a crash, a SIGKILL.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from forge import messages
from forge.job_files import VERDICT, forge_dir, suffix, write_json


def write(job_dir: Path, reason: str, step: int, code: int) -> None:
    """Leave the verdict of this attempt."""
    content = {
        "reason": reason,
        "step": step,
        "exit_code": int(code),
        "pid": os.getpid(),
        "time": time.time(),
    }
    try:
        write_json(forge_dir(job_dir) / f"{VERDICT}{suffix()}", content)
    except OSError as error:  # a full disk must not keep a job from leaving in order
        messages.warn(f"The verdict ({reason}) could not be written: {error}")


def clear(job_dir: Path) -> None:
    """Remove the verdict of an earlier attempt."""
    (forge_dir(job_dir) / f"{VERDICT}{suffix()}").unlink(missing_ok=True)
