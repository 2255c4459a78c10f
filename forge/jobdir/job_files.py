"""The small files in a job's own directory, by name; written so that nobody reads half of one.

<job dir>/output.log            what the job's processes print, over all attempts
<job dir>/.forge/plan.json      how to start it; `plan.py` writes and reads it
<job dir>/.forge/task.pkl       the config and the function, frozen at submission
<job dir>/.forge/state.json     where it stands, and what it has used of its budgets
<job dir>/.forge/code.json      the code it was first started with; `job_dir.py` compares it
<job dir>/.forge/lock           held while a process of the job may live
<job dir>/.forge/report.json     how the supervisor saw the last attempt end
<job dir>/.forge/verdict.json   why the training process says it ended
<job dir>/.forge/result.pkl     what main returned, or raised
<job dir>/.forge/sick.json      which node failed a health check; `sick.py` writes and reads it
<job dir>/.forge/hang/          reports and query while a rank makes no progress; `hang_files.py`
<job dir>/hangs/<n>/            the stacks of all ranks of a hang, and which of them is behind

Where a job has several tasks, report, verdict, result, sick.json and output are there for each:
`report.json.1` is rank 1's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forge.filesystem.files import FORGE, open_file
from forge.filesystem.files import read_trusted as read_trusted
from forge.filesystem.files import write_atomically as write_atomically
from forge.filesystem.locks import take_lock
from forge.filesystem.steps import step_dirs, step_of

OUTPUT = "output.log"
PLAN = "plan.json"
TASK = "task.pkl"
STATE = "state.json"
LOCK = "lock"
REPORT = "report.json"
VERDICT = "verdict.json"
HANG = "hang"
RESULT = "result.pkl"
CODE = "code.json"

ENDED = ("failed", "stopped", "terminated")
"""States of a job that has ended before its end."""
TOKEN = "FORGE_JOB_TOKEN"
"""Environment variable that marks every process of a job that one of forge's launchers started."""
SAVE_WITHIN = "FORGE_SAVE_WITHIN_S"
"""Environment variable of a task: its first save is due then, since the last attempt had none."""
RANKS = "FORGE_RANKS"
"""Environment variable of a task: how many there are."""
RESUME = "FORGE_RESUME"
"""Environment variable of the user's: `changed` is `resilience.resume=changed` for one claim."""
REHEARSAL = "FORGE_REHEARSAL"
"""Environment variable of a script that is rehearsed: where its job lies."""
RANK = "FORGE_RANK"
"""Environment variable of a task among several: its number."""
JOB_DIR = "FORGE_JOB_DIR"
"""Environment variable of a task: the job's directory."""
PROGRESS = "FORGE_PROGRESS"
"""Environment variable of a task: the page of memory in which it says what it is doing, and behind
which its stacks are written when it hangs."""
ATTEMPT = "FORGE_ATTEMPT"
"""Environment variable of a task: the number of this attempt, from 1; for a rule's recovery
command that of the attempt before it."""
RETURN_CODE = "FORGE_RETURN_CODE"
"""Environment variable of a rule's recovery command: the exit code that the rule names."""
RECOVERS = "FORGE_RECOVERS"
"""Environment variable of a supervisor: the number of the rule whose recovery command it runs."""


def suffix(rank: int | None = None) -> str:
    """The end of the names of a rank's own files (report, verdict, result, ledger); none for 0.

    Args:
        rank: Whose; None: this process's.
    """
    number = int(os.environ.get(RANK) or 0) if rank is None else rank
    return f".{number}" if number else ""


def output_of(job_dir: Path, rank: int | None = None) -> int:
    """A descriptor that appends to what a rank prints.

    Raises:
        OSError: Where it cannot be opened.
    """
    path = Path(job_dir) / f"{OUTPUT}{suffix(rank)}"
    return open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def forge_dir(job_dir: Path | str) -> Path:
    """Where forge keeps what it knows of a job."""
    return Path(job_dir) / FORGE


def job_ledger(job_dir: Path) -> Path:
    """Where a job's wrapper accounts for its attempts; there since the first of them."""
    return forge_dir(job_dir) / "ledger" / "job.jsonl"


def is_busy(job_dir: Path) -> bool:
    """Whether a process holds the lock of a job's directory."""
    try:
        fd = open_file(forge_dir(job_dir) / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not take_lock(fd)
    finally:
        os.close(fd)


def saved_step(checkpoint_dir: Path) -> int:
    """Steps done in the newest checkpoint; -1 without one."""
    try:
        newest = next(iter(step_dirs(checkpoint_dir)), None)
    except OSError:
        return -1
    step = None if newest is None else step_of(newest)
    return -1 if step is None else step


def write_json(path: Path, content: dict[str, Any], *, is_synced: bool = False) -> None:
    """Replace a file of JSON in one step; `is_synced` also makes it survive a power cut."""
    write_atomically(path, json.dumps(content) + "\n", is_synced=is_synced)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a file of JSON; None where there is none, or none that makes sense.

    Raises:
        Untrusted: Where somebody else could have written it.
    """
    try:
        content = json.loads(read_trusted(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
