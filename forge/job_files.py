"""The small files in a job's own directory, by name; written so that nobody reads half of one.

<job dir>/output.log            what the job's processes print, over all attempts
<job dir>/.forge/plan.json      how to start it; `forge/launch/plan.py` writes it
<job dir>/.forge/task.pkl       the config and the function, frozen at submission
<job dir>/.forge/state.json     where it stands, and what it has used of its budgets
<job dir>/.forge/lock           held while a process of the job may live
<job dir>/.forge/watch.json     how the watch saw the last attempt end
<job dir>/.forge/verdict.json   why the training process says it ended
<job dir>/.forge/result.pkl     what main returned, or raised
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OUTPUT = "output.log"
PLAN = "plan.json"
TASK = "task.pkl"
STATE = "state.json"
LOCK = "lock"
WATCH = "watch.json"
VERDICT = "verdict.json"
RESULT = "result.pkl"


def forge_dir(job_dir: Path | str) -> Path:
    """Where forge keeps what it knows of a job."""
    return Path(job_dir) / ".forge"


def write_atomically(path: Path, text: str | bytes, is_synced: bool = False) -> None:
    """Replace a small file in one step; `is_synced` also makes it survive a power cut."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file of JSON in one step."""
    write_atomically(path, json.dumps(content) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a file of JSON; None where there is none, or none that makes sense."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
