"""The causes that `forge why` finds, and the facts about a job that they are found by.

docs/how-to/watch-a-sweep.md has a line about each cause. The facts are read once, lazily, from the
job's directory; the rules only look at them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from forge.jobdir.jsonl import Event
from forge.sweeps import attempts, output, reader
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.job import SweepJob
from forge.sweeps.reader import Files
from forge.sweeps.sweep import Sweep


class Cause(Enum):
    """Why a job ended, waits, starts again or saved nothing. `--json` prints the value."""

    # The job goes on, or has finished.
    finished = "finished"
    running = "running"
    starting = "starting"
    nothing_saved_yet = "nothing_saved_yet"
    save_failed = "save_failed"
    not_started = "not_started"
    pending = "pending"

    # The user's code and config.
    exception = "exception"
    exit_code = "exit_code"
    code_changed = "code_changed"
    config = "config"
    halted = "halted"
    no_run = "no_run"

    # Signals, and the time that a stop takes.
    time_limit = "time_limit"
    signal_missed = "signal_missed"
    save_too_long = "save_too_long"
    stopped_late = "stopped_late"

    # The machine, its memory and disks, other processes.
    out_of_memory = "out_of_memory"
    disk_full = "disk_full"
    checkpoints = "checkpoints"
    directory_in_use = "directory_in_use"
    killed = "killed"
    lost = "lost"
    hung = "hung"
    rank_lost = "rank_lost"
    unhealthy = "unhealthy"

    # The cluster, and people.
    preempted = "preempted"
    node_failed = "node_failed"
    requested = "requested"
    signalled = "signalled"
    cancelled = "cancelled"
    interrupted = "interrupted"
    orphaned = "orphaned"
    not_requeued = "not_requeued"
    refused = "refused"

    # Why the job is not started again.
    budget = "budget"
    no_progress = "no_progress"
    requeue_disabled = "requeue_disabled"
    unknown = "unknown"


@dataclass(frozen=True)
class Explanation:
    """A cause."""

    cause: Cause
    text: str
    """A sentence that says what happened."""
    evidence: tuple[str, ...] = ()
    """Where forge has it from: a file, an event, a line of the output."""
    remedy: tuple[str, ...] = ()
    """Changes that help: a command, or a key of the policy and its value."""


class Evidence:
    """The files of a job.

    Args:
        sweep: The sweep of the job.
        job: The job.
    """

    def __init__(self, sweep: Sweep, job: SweepJob) -> None:
        self.sweep = sweep
        self.job = job

    @property
    def directory(self) -> Path:
        """The job's directory."""
        return self.job.directory

    @functools.cached_property
    def files(self) -> Files:
        """State, plan, verdict, and the end of the ledger."""
        return reader.files_of(self.job.directory)

    @functools.cached_property
    def attempts(self) -> list[AttemptRecord]:
        """All attempts, the oldest first."""
        return attempts.read(self.job.directory)

    @property
    def last_ended(self) -> AttemptRecord | None:
        """The last attempt whose end is recorded."""
        return next((one for one in reversed(self.attempts) if one.ended is not None), None)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of the job's restarts, as its plan has them."""
        return dict(self.files.plan.get("requeue") or {})

    @property
    def counts(self) -> dict[str, Any]:
        """How much of the limits is used."""
        return asdict(self.files.state.counts) if self.files.state else {}

    @functools.cached_property
    def output(self) -> str:
        """The end of the output of the rank that ended the job."""
        return output.end_of(self.job.directory, self.job.rank)

    def resume(self, *words: object) -> str:
        """The command that starts the job again."""
        return self.sweep.command("resume", *words)

    def output_file(self) -> str:
        """The file with that output."""
        return str(output.path_of(self.job.directory, self.job.rank))

    def events(self, *kinds: str, attempt: AttemptRecord | None = None) -> Iterator[Event]:
        """The events of these kinds, of one attempt or of all."""
        for one in [attempt] if attempt is not None else self.attempts:
            yield from (event for event in one.events if event["kind"] in kinds)
