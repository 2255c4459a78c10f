"""The small files in a job's directory, by name; each is replaced in one step.

<job dir>/output.log            output of the job's processes, over all attempts
<job dir>/.forge/plan.json      how to start the job; written and read by `plan.py`
<job dir>/.forge/task.pkl       the config and the function, frozen at submission
<job dir>/.forge/state.json     the job's state, and how much of its budgets is used; see
                                `job_state.py`
<job dir>/.forge/code.json      the code of the first start; compared by `job_dir.py`
<job dir>/.forge/lock           locked while processes of the job can be alive
<job dir>/.forge/report.json    how the last attempt ended, from its supervisor
<job dir>/.forge/verdict.json   why the last attempt ended, from the training process
<job dir>/.forge/result.pkl     the return value or exception of main
<job dir>/.forge/result.json    the return value of main, if JSON can represent it
<job dir>/.forge/sick.json      the node that failed a health check; see `node_fault.py`
<job dir>/.forge/hang/          during a suspected hang: reports and a query; see `hang_files.py`
<job dir>/checkpoints/step_<N>  a checkpoint; the directory of checkpoints can be elsewhere
<job dir>/hangs/<n>/            the stacks of all ranks in a hang, and the rank that is behind

If a job has several tasks, each has its own report, verdict, result, sick.json and output:
`report.json.1` is rank 1's.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from forge.filesystem.files import FORGE, open_file
from forge.filesystem.files import read_trusted as read_trusted
from forge.filesystem.files import write_atomically as write_atomically
from forge.filesystem.locks import take_lock

OUTPUT = "output.log"
PLAN = "plan.json"
TASK = "task.pkl"
STATE = "state.json"
LAUNCH = "launch.json"
"""In a sweep's directory: its last launch."""
LOCK = "lock"
REPORT = "report.json"
VERDICT = "verdict.json"
HANG = "hang"
RESULT = "result.pkl"
RESULT_JSON = "result.json"
CODE = "code.json"

TOKEN = "FORGE_JOB_TOKEN"
"""Environment variable that marks every process of a job that one of forge's launchers started."""
SAVE_WITHIN = "FORGE_SAVE_WITHIN_S"
"""Environment variable of a task: save after so many seconds, since the last attempt did not."""
RANKS = "FORGE_RANKS"
"""Environment variable of a task: the number of ranks."""
RESUME = "FORGE_RESUME"
"""Environment variable set by users: `changed` acts as `resilience.resume=changed` once."""
REHEARSAL = "FORGE_REHEARSAL"
"""Environment variable of a script under `forge rehearse`: the job's directory."""
RANK = "FORGE_RANK"
"""Environment variable of a task, if there are several: its rank."""
JOB_DIR = "FORGE_JOB_DIR"
"""Environment variable of a task: the job's directory."""
PROGRESS = "FORGE_PROGRESS"
"""Environment variable of a task: descriptors of its heartbeat page in shared memory, after which
its stacks are written if it hangs."""
ATTEMPT = "FORGE_ATTEMPT"
"""Environment variable of a task: the number of this attempt, from 1; for a rule's recovery
command the number of the previous attempt."""
RETURN_CODE = "FORGE_RETURN_CODE"
"""Environment variable of a rule's recovery command: the exit code that matched the rule."""
RECOVERS = "FORGE_RECOVERS"
"""Environment variable of a supervisor: the number of the rule whose recovery command it runs."""

_STEP = re.compile(r"step_(\d+)")


def suffix(rank: int | None = None) -> str:
    """The suffix of a rank's own files (report, verdict, result, ledger); empty for rank 0.

    Args:
        rank: The rank; None: this process's.
    """
    number = int(os.environ.get(RANK) or 0) if rank is None else rank
    return f".{number}" if number else ""


def output_of(job_dir: Path, rank: int | None = None) -> int:
    """Open the output file of a rank for appending.

    Raises:
        OSError: If it cannot be opened.
    """
    path = Path(job_dir) / f"{OUTPUT}{suffix(rank)}"
    return open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def forge_dir(job_dir: Path | str) -> Path:
    """The `.forge` directory of a job."""
    return Path(job_dir) / FORGE


def job_ledger(job_dir: Path) -> Path:
    """The ledger of a job's wrapper, which exists from the first attempt on."""
    return forge_dir(job_dir) / "ledger" / "job.jsonl"


def is_busy(job_dir: Path) -> bool:
    """Whether a process has the job's directory locked."""
    try:
        fd = open_file(forge_dir(job_dir) / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not take_lock(fd)
    finally:
        os.close(fd)


def step_of(path: Path) -> int | None:
    """The number in `step_<N>`, or None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_dirs(directory: Path) -> list[Path]:
    """All paths named `step_<N>` in a directory, newest first."""
    found = [path for path in directory.iterdir() if step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def saved_step(checkpoint_dir: Path) -> int:
    """The step of the newest checkpoint; -1 if there is none."""
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
    """The object in a JSON file; None if it is missing or invalid.

    Raises:
        Untrusted: If another user could have written it.
    """
    try:
        content = json.loads(read_trusted(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
