"""The state of a job, and how much of its budgets is used: one file, whatever starts the job.

<job dir>/.forge/state.json   a JSON object, replaced at each change; on a full disk in place

Its writers are the wrapper of forge's launchers and, in a job that has no wrapper (a batch script
of the user's own, plain submitit), the outermost process of forge. Launchers read it, too. A file
of another version is read as far as its fields are known. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from forge.errors import ExitCode, Reason
from forge.filesystem.preallocated_file import write_padded
from forge.jobdir.job_files import STATE, forge_dir, read_json

VERSION = 1
_NUM_BYTES = 4096


class State(Enum):
    """The state of a job."""

    queued = "queued"
    """The job waits for its first start, or has been requeued."""
    starting = "starting"
    """The process runs, but no step has begun."""
    running = "running"
    stopping = "stopping"
    """The job was asked to save and exit."""
    finished = "finished"
    failed = "failed"
    stopped = "stopped"
    """The job saved and exited before its end; the sweep's command resumes it."""
    terminated = "terminated"
    """A command of `forge exec` that was asked to stop, and did."""
    lost = "lost"
    """Its processes have ended without recording why, and nothing will start it again. Nothing
    writes this state: readers conclude it."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended, and is not started again by itself."""
        return self in _FINAL

    @property
    def is_active(self) -> bool:
        """Whether processes of the job exist."""
        return self in (State.starting, State.running, State.stopping)


_FINAL = (State.finished, State.failed, State.stopped, State.terminated, State.lost)


@dataclass
class Counts:
    """The restarts and failures of a job so far."""

    restarts: int = 0
    preemptions: int = 0
    timeouts: int = 0
    failures: int = 0
    hangs: int = 0
    last_hang: list[int] = field(default_factory=list)
    """Number of steps at the last hang, and the step of the newest checkpoint at that time."""
    no_progress: int = 0
    """Attempts in a row that saved nothing new."""
    early_evictions: int = 0
    """Attempts in a row that the cluster ended before they could save anything."""
    excluded: int = 0
    """Restarts on other nodes, since one was unhealthy."""
    by_rule: dict[str, int] = field(default_factory=dict)
    """Number of a rule -> restarts it has granted."""
    recovery: dict[str, int] | None = None
    """A rule's recovery command that is to run before the next attempt: the number of the rule,
    and the exit code that it is for."""
    brief: int = 0
    """Attempts in a row that quickly asked to be run again, without known progress."""
    out_of_memory: int = 0
    """Attempts in a row for which memory ran out."""
    best_step: int = -1
    """The highest value of `ledger.saved_steps` so far; -1 before the first checkpoint."""
    unsaved_s: float = 0.0
    """Seconds of the last attempt, if it saved nothing new: the next attempt saves earlier."""


@dataclass(kw_only=True)
class JobState:
    """The content of the file."""

    state: State
    because: str = ""
    """Why the job is in this state, for people."""
    reason: Reason | None = None
    """Why the job ended; None if it has not ended."""
    code: int = 0
    """The exit code with which the job ended, or -N for signal N."""
    rank: int = 0
    """The rank that ended the job: its output and its exception show the cause."""
    hang: str = ""
    """A hang of the current attempt that was only logged, for people."""
    job: str = ""
    """The scheduler's name for the job, such as Slurm's number; empty on one machine."""
    start: str = ""
    """Distinguishes the starts of the job by the scheduler: under Slurm, the restart count."""
    host: str = field(default_factory=lambda: os.uname().nodename)
    """The machine of the process that wrote the file."""
    pid: int = field(default_factory=os.getpid)
    """That process."""
    nodes: str = ""
    """The nodes on which the tasks run, as Slurm writes them: `n[1-2]`."""
    time: float = field(default_factory=time.time)
    """Unix time at which the file was written."""
    began: float = 0.0
    """Unix time at which the current or last attempt began; 0.0 before the first."""
    counts: Counts = field(default_factory=Counts)
    has_steps: bool = True
    """Whether the job reports its steps; commands of `forge exec` do not."""
    ends_next_start: bool = False
    """Whether the next start must end at once: the job was given up, but Slurm had requeued it."""
    argv: list[str] = field(default_factory=list)
    """The arguments of a job in a batch script of the user's own."""
    backend: dict[str, Any] = field(default_factory=dict)
    """More fields of the file, for the backend that has written them."""
    version: int = VERSION

    def is_of_same_process(self, other: JobState) -> bool:
        """Whether the same process has written both, and the job has not ended in between."""
        is_same = (self.host, self.pid, self.start) == (other.host, other.pid, other.start)
        return is_same and not self.state.is_final

    @property
    def is_decided(self) -> bool:
        """Whether the start of the job has ended, in the queue or for good."""
        return self.state is State.queued or self.state.is_final

    @property
    def exit_code(self) -> int:
        """The exit code of the job's own process; 0 only if the job has finished."""
        return exit_code(self.code, is_finished=self.state is State.finished)

    def write(self, job_dir: Path) -> None:
        """Replace the file. Raises OSError if it cannot be written; the old content stays."""
        names = {"state": self.state.name, "reason": self.reason and self.reason.name}
        content = asdict(self) | names
        more = content.pop("backend")
        write_padded(forge_dir(job_dir) / STATE, json.dumps(more | content) + "\n", _NUM_BYTES)


def exit_code(code: int, *, is_finished: bool) -> int:
    """The exit code of a job's own process, from that of its task, which is -N for signal N."""
    code = code if code >= 0 else 128 - code
    return code if code or is_finished else int(ExitCode.TERMINATED)


def read(job_dir: Path) -> JobState | None:
    """The state of the job in a directory; None if there is none, or it makes no sense.

    Raises:
        Untrusted: If another user could have written it.
    """
    content = read_json(forge_dir(job_dir) / STATE)
    return None if content is None else decoded(content)


def is_finished(job_dir: Path) -> bool:
    """Whether the job in a directory is finished. Raises Untrusted, as `read` does."""
    state = read(job_dir)
    return state is not None and state.state is State.finished


def decoded(content: dict[str, Any]) -> JobState | None:
    """The state in the JSON object of a file, of this version or another; None if it is none."""
    try:
        return _decoded(content)
    except (TypeError, LookupError, AttributeError):
        return None


def _decoded(content: dict[str, Any]) -> JobState:
    content["state"] = State[content["state"]]
    content["reason"] = Reason.__members__.get(content.get("reason") or "")
    counts, known = content.get("counts", {}), {one.name for one in fields(Counts)}
    content["counts"] = Counts(**{name: counts[name] for name in known & counts.keys()})
    own = {one.name for one in fields(JobState)} - {"backend"}
    backend = {name: value for name, value in content.items() if name not in own}
    return JobState(**{name: content[name] for name in own & content.keys()}, backend=backend)
