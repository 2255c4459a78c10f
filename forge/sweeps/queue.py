"""Slurm's view of jobs that have not ended: who waits and why, and whose job is gone.

squeue is asked once, and only if a job has a Slurm id; without an answer the files alone count.
"""

from __future__ import annotations

from dataclasses import replace

from forge.errors import SlurmRefused
from forge.jobdir.job_state import State
from forge.slurm import client
from forge.slurm.client import Queued
from forge.slurm.job_info import Stage, Why, cause_of, stage_of
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep, read_again

_ASK_S = 10.0


def asked(sweep: Sweep) -> Sweep:
    """The sweep with what squeue says of its jobs."""
    left = [job for job in sweep.jobs if job.slurm_id and not job.state.is_final]
    if not left or not client.can_submit():
        return sweep
    try:
        queue = client.queue(_ASK_S)
    except SlurmRefused as error:
        text = f"squeue does not answer, so the states are those of the files: {error}"
        return replace(sweep, missing=(*sweep.missing, text))
    jobs = []
    for job in sweep.jobs:
        if job in left:
            # If Slurm has ended it: it may have recorded its end since its files were read.
            again = job if queue_has(queue, job.slurm_id) else read_again(sweep.path, job)
            recorded = again if again.state.is_final else None
            job = recorded or _with(job, queue.get(job.slurm_id))
        jobs.append(job)
    return replace(sweep, jobs=tuple(jobs))


def queue_has(queue: dict[str, Queued], slurm_id: str) -> bool:
    """Whether a job is pending, running, or between these."""
    return slurm_id in queue and queue[slurm_id].is_alive


def _with(job: SweepJob, queued: Queued | None) -> SweepJob:
    if queued is not None and queued.is_alive:
        if stage_of(queued.state) is not Stage.waiting:
            state = State.starting if job.state is State.queued else job.state
            return replace(job, state=state)
        return replace(job, state=State.queued, waits_for=queued.waits_for, rate=None, left_s=None)
    if queued is not None and cause_of(queued.state) is Why.cancelled:
        return replace(job, state=State.stopped, is_cancelled=True, because="cancelled")
    how = "no longer knows it" if queued is None else f"says {queued.state}"
    because = f"its end is not recorded, and Slurm {how}"
    return replace(job, state=State.lost, because=because)
