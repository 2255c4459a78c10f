"""The lines about the changes of a job, for logs and above the table."""

from __future__ import annotations

import math

from forge.jobdir import jsonl
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import State
from forge.messages import escape
from forge.sweeps import output, status
from forge.sweeps.job import SweepJob


def news(job: SweepJob, last: SweepJob | None) -> list[str]:
    """The changes since `last`, a line each; empty if there are none."""
    own = _line(job, last)
    return [*_between(job, last), *([own] if own else [])]


def _between(job: SweepJob, last: SweepJob | None) -> list[str]:
    """The restarts that began and ended since `last`: only the job's ledger still says why."""
    if last is None:
        return []
    missed = range(last.restarts + 1, job.restarts + job.state.is_final)
    if not missed:
        return []
    try:
        found = list(jsonl.events(job_ledger(job.directory)))
    except OSError:  # `forge status` and the report name what cannot be read
        found = []
    whys = {one.get("restarts"): one.get("because") for one in found if one["kind"] == "requeue"}
    texts = ((number, whys.get(number)) for number in missed)
    return [
        f"restart {number}: {escape(str(why))}" if why else f"restart {number}"
        for number, why in texts
    ]


def _line(job: SweepJob, last: SweepJob | None) -> str:
    was = State.queued if last is None else last.state
    problem = status.problem_of(job)
    remark = f": {problem}" if problem else ""
    if job.state is not was and job.state.is_final:
        if last is None and job.state is State.finished:
            return ""  # it was finished before this sweep resumed
        log = f" ({escape(str(output.path_of(job.directory, job.rank)))})"
        return f"{job.state.value}{_at(job)}{remark}{log if job.state is State.failed else ''}"
    if last is not None and job.restarts > last.restarts:
        return f"restart {job.restarts}{_at(job, 'after')}{remark}"
    if job.hang and (last is None or job.hang != last.hang):
        return escape(f"{job.hang} ({job.directory})")
    is_start = was is State.queued and job.state.is_active and (last is None or not job.restarts)
    return f"started {escape(job.label)}" if is_start else ""


def _at(job: SweepJob, word: str = "at") -> str:
    """The progress as ` at step 3 of 10 (30%)`; empty before training began."""
    percent = math.floor((job.step or 0) * 100 / job.steps) if job.steps else 0  # 100 is the end
    share = f" of {job.steps} ({percent}%)" if job.steps else ""
    return "" if job.step is None else f" {word} step {job.step}{share}"
