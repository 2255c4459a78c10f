"""A job of a sweep, as its files describe it: plain values, which no command changes."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forge.jobdir.job_state import State
from forge.sweeps import curves
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.attempts import read as read_attempts
from forge.sweeps.ledger_tail import Metric

SCHEMA = 1
"""Version of the fields below, in the output of every `--json`."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint of a job."""

    path: Path
    step: int
    saved: float
    """Unix time of the commit."""

    def age_s(self, now: float | None = None) -> float:
        """Seconds since the commit."""
        return max((time.time() if now is None else now) - self.saved, 0.0)


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep, or a single run.

    It is a snapshot: `forge.sweep(path)` reads the files again.
    """

    number: int
    """Hydra's `hydra.job.num`; 0 for a single run."""
    directory: Path
    overrides: tuple[str, ...]
    """Hydra's overrides of the job; empty if they are not known."""
    state: State
    label: str = ""
    """The overrides that differ between the jobs of the sweep."""
    reason: str = ""
    """Why the job ended, or its last attempt: the name of a `forge.errors.Reason`; can be empty."""
    because: str = ""
    """The same for people, with details."""
    frame: str = ""
    """File, line and function of the exception that ended the job; can be empty."""
    code: int | None = None
    """Exit code of the last attempt, or minus the signal that killed it; None if unknown."""
    rank: int = 0
    """The rank whose output explains the end."""
    step: int | None = None
    """Steps done; None before training began, or if the job does not use `forge.Run`."""
    steps: int | None = None
    """Steps planned; None if unknown."""
    attempts: int = 0
    """Number of starts so far."""
    ends: Counter[str] = field(default_factory=Counter)
    """Reason -> number of attempts that ended for it."""
    checkpoint: SavedCheckpoint | None = None
    """The newest committed checkpoint."""
    lost_step: int | None = None
    """The step of the last checkpoint, if it was saved and no checkpoint is left."""
    start_problem: str = ""
    """How the objects with which the training began differ from those of the first start."""
    save_every_s: float | None = None
    """Seconds between two periodic saves; None: none are saved by time, or it is not known."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Name -> values logged so far."""
    rate: float | None = None
    """Steps per second since the last start; None unless it is training."""
    left_s: float | None = None
    """Seconds to the planned number of steps, at that rate."""
    node: str = ""
    """Host of the last attempt."""
    slurm_id: str = ""
    """Slurm's number of the job: `12`, or `12_3` in an array; empty without Slurm."""
    waits_for: str = ""
    """Slurm's reason why the job waits in the queue."""
    hang: str = ""
    """A hang of this attempt that was only logged (`hang.action=warn`)."""
    began: float | None = None
    """Unix time of the first start."""
    since: float | None = None
    """Unix time at which the job came into this state; of a running job, of this attempt."""
    pid: int | None = None
    """The process that wrote the state, or that trains without a wrapper; on `node`."""
    has_wrapper: bool = True
    """Whether one of forge's launchers started it; else it has no process above the training."""
    is_cancelled: bool = False
    """Whether a person has cancelled it: then it starts again only if it is named."""
    is_command: bool = False
    """Whether it is a command of `forge exec`, whose steps forge cannot see."""
    missing: tuple[str, ...] = ()
    """Files that could not be read, and why, for people."""

    def history(self) -> list[AttemptRecord]:
        """All attempts of the job, the oldest first, with their events; reads the whole ledgers.

        Raises:
            OSError: If a ledger cannot be read.
        """
        return read_attempts(self.directory)

    def curve(self, metric: str) -> dict[int, float]:
        """Step -> value of a metric over all attempts; a repeated step counts once.

        Raises:
            OSError: If a ledger cannot be read.
        """
        found = curves.read(self.directory, [metric])[metric]
        return dict(zip(found.steps, found.values, strict=True))

    @property
    def share(self) -> float | None:
        """Share of the planned steps that is done, 0 to 1; None if unknown."""
        if self.state is State.finished:
            return 1.0
        if self.step is None or not self.steps:
            return None
        return min(self.step / self.steps, 1.0)

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return max(self.attempts - 1, 0)

    @property
    def needs_attention(self) -> bool:
        """Whether the job will not finish unless somebody acts, or has had a problem."""
        is_bad = self.state in (State.failed, State.lost, State.stopped, State.terminated)
        return is_bad or bool(self.hang)
