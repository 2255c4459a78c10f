"""A job's row in the display: a value that the queue fills and the display draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge.jobdir.job_state import State


@dataclass(frozen=True)
class JobView:
    """The current state of a job."""

    number: int
    """Hydra's `hydra.job.num`."""
    overrides: str
    """The overrides that differ between jobs: `lr=0.001 seed=3`; can be empty."""
    directory: Path
    state: State
    step: int | None = None
    """Steps done; None before training began, or if the job does not use `forge.Run`."""
    steps: int | None = None
    """Steps planned; None if unknown."""
    restarts: int = 0
    rate: float | None = None
    """Steps per second, in this attempt."""
    left_s: float | None = None
    """Seconds left at this rate."""
    remark: str = ""
    """Why the job failed or was restarted, in a few words; can be empty."""
    waits_for: str = ""
    """On a cluster: Slurm's reason why the job waits in the queue."""
    hang: str = ""
    """A hang that was only logged (`hang.action=warn`); can be empty."""
