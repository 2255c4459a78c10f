"""What starting a sweep's command again does, in words for the line that shows the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from forge.errors import Reason
from forge.launch.progress.observed import ObservedJob
from forge.launch.progress.view import State

_WORDS: dict[Reason | None, str] = {Reason.cancelled: "cancelled", Reason.halted: "halted"}
"""Reasons that say more than the state of a job: perhaps nobody wants it back."""


def how_to_resume(jobs: Iterable[ObservedJob], command: str, in_queue: int = 0) -> str:
    """The command, and what it does with each job that is not finished; empty if all are.

    Args:
        jobs: Those that have ended, or that no launcher has started.
        command: The sweep's.
        in_queue: Jobs that run or wait on a cluster, for which the command waits.
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
        does.append(f"starts: {waiting} not started yet")
    if in_queue:
        later = "starts again jobs that have failed or were cancelled by then"
        does.append(f"waits for {in_queue} in the queue; {later}")
    return f"To resume ({'; '.join(does)}):\n  {command}" if does else ""
