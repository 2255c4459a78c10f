"""What is shown of a job: a value, filled by the queue and drawn by the display."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class State(Enum):
    """Where a job of a sweep is."""

    queued = "queued"
    starting = "starting"
    """Its process runs, but no step has begun."""
    running = "running"
    stopping = "stopping"
    """Asked to save and leave."""
    finished = "finished"
    failed = "failed"
    stopped = "stopped"
    """Saved and left before its end; the sweep's command resumes it."""
    terminated = "terminated"
    """The same of a command: it was asked to stop, and did."""

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens in this sweep."""
        return self in (State.finished, State.failed, State.stopped, State.terminated)


@dataclass(frozen=True)
class JobView:
    """One job as it stands now."""

    number: int
    """Hydra's `hydra.job.num`."""
    overrides: str
    """What makes it different from the others: `lr=0.001 seed=3`; may be empty."""
    directory: Path
    state: State
    step: int | None = None
    """Steps done; None before training began, or where the job does not use `forge.Run`."""
    steps: int | None = None
    """Steps planned; None where nobody knows."""
    restarts: int = 0
    rate: float | None = None
    """Steps a second, in this attempt."""
    left_s: float | None = None
    """Seconds left at this rate."""
    remark: str = ""
    """Why it failed or was restarted, in a few words; may be empty."""
    waits_for: str = ""
    """On a cluster: why it waits in the queue, in Slurm's word."""
    hang: str = ""
    """A hang that was only logged (`hang.action=warn`); may be empty."""
