"""Which jobs of a sweep `forge resume` starts again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.jobdir.job_state import State
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep

_FAILED = (State.failed, State.lost)


@dataclass(frozen=True)
class Left:
    """A job that does not start, and why."""

    job: SweepJob
    because: str


def jobs_to_start(
    sweep: Sweep, jobs: Sequence[SweepJob], *, are_named: bool, only_failed: bool
) -> tuple[list[SweepJob], list[Left]]:
    """The jobs to start, and the others.

    Args:
        sweep: The sweep.
        jobs: The jobs that are meant.
        are_named: Whether a person has named each of them: then cancelled jobs start, too.
        only_failed: Whether only jobs start that failed or were lost.
    """
    chosen, left = [], []
    for job in jobs:
        because = ""
        if job.state is State.finished:
            because = "finished"
        elif job.state.is_active:
            because = f"is {job.state.value}"
        elif job.state is State.queued and job.slurm_id:
            because = f"waits in Slurm's queue as {job.slurm_id}"
        elif only_failed and job.state not in _FAILED:
            because = f"is {job.state.value}, and not failed"
        elif not are_named and job.is_cancelled:
            because = f"was cancelled; `{sweep.command('resume', job.number)}` starts it"
        if because:
            left.append(Left(job, because))
        else:
            chosen.append(job)
    return chosen, left
