"""The line with the command that resumes a sweep, and the effect of the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from forge.errors import Reason
from forge.jobdir.job_state import State
from forge.launch.progress.observed import ObservedJob

_WORDS: dict[Reason | None, str] = {Reason.cancelled: "cancelled", Reason.halted: "halted"}
"""Reasons to show instead of the job's state, since the user might not want the job to restart."""


def how_to_resume(jobs: Iterable[ObservedJob], command: str, in_queue: int = 0) -> str:
    """The command, and its effect on the jobs that are not finished; empty if all are finished.

    Args:
        jobs: The jobs that have ended, or were never started.
        command: The command that starts the sweep.
        in_queue: Number of jobs in the cluster's queue, for which the command would wait.
    """
    ended: Counter[str] = Counter()
    waiting = 0
    for job in jobs:
        if job.state.is_final and job.state is not State.finished:
            ended[_WORDS.get(job.reason, job.state.value)] += 1
        waiting += not job.state.is_final
    does = []
    if ended:
        does.append("starts again: " + ", ".join(f"{n} {word}" for word, n in ended.items()))
    if waiting:
        does.append(f"starts {waiting} that have not run yet")
    if in_queue:
        then = "resumes the jobs that failed or were cancelled"
        does.append(f"waits until the sweep's jobs in the queue ({in_queue} now) end, then {then}")
    return f"To resume ({'; '.join(does)}):\n  {command}" if does else ""
