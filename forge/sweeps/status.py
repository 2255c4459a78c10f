"""The table of a sweep: a row for each job, notes below the rows that need them.

The launchers draw the same table while they run; `forge status` prints it once, or again and again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forge.jobdir.job_state import State
from forge.messages import escape
from forge.sweeps import output, to_start, words
from forge.sweeps.chosen_metric import Chosen
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep

MOST = 50
"""Jobs in a table that does not name them; of more jobs, only those that need attention."""
ORDER = (
    *(State.failed, State.lost, State.stopped, State.terminated, State.stopping),
    *(State.starting, State.running, State.queued, State.finished),
)
"""The order of states in a summary and in `--sort state`: what needs attention comes first."""
STYLES = {
    State.queued: "dim",
    State.starting: "cyan",
    State.running: "cyan",
    State.stopping: "yellow",
    State.finished: "green",
    State.failed: "red",
    State.lost: "red",
    State.stopped: "yellow",
    State.terminated: "yellow",
}


class JobRow(NamedTuple):
    """A job in the table."""

    job: SweepJob
    cells: dict[str, str]
    notes: list[str]


@dataclass(frozen=True)
class Table:
    """The content of the table, before it is drawn."""

    title: str
    summary: str
    rows: list[JobRow]
    remarks: list[str] = field(default_factory=list)
    """Below the rows: how many jobs are not shown, and which files could not be read."""
    next: list[tuple[str, str]] = field(default_factory=list)
    """(command, what it is for)."""


RIGHT = ("job", "step", "rate", "left")
FLEXIBLE = ("overrides",)


def table(
    sweep: Sweep,
    jobs: Sequence[SweepJob],
    metric: Chosen,
    *,
    is_chosen: bool = False,
    now: float | None = None,
) -> Table:
    """The table of some jobs of a sweep.

    Args:
        sweep: The sweep.
        jobs: Its jobs in the order of the table.
        metric: The metric to show.
        is_chosen: Whether a person has chosen the jobs; else at most `MOST` are shown.
        now: Unix time; None: now.
    """
    now = time.time() if now is None else now
    metric = metric.of_sweep(jobs)
    shown = list(jobs)
    remarks = list(map(escape, sweep.missing))
    if not is_chosen and len(shown) > MOST:
        shown = [job for job in shown if job.needs_attention][:MOST]
        rest, command = len(jobs) - len(shown), sweep.command("status --all")
        remarks.insert(0, f"… and {rest} more; `{escape(command)}` shows all jobs")
    is_single = sweep.is_single
    rows = [
        JobRow(job, cells(job, metric, now), notes(job, now, is_single=is_single)) for job in shown
    ]
    return Table(title(sweep), summary(sweep, now), rows, remarks, following(sweep))


def title(sweep: Sweep) -> str:
    """The directory, and the overrides that all jobs have in common."""
    kind = "run" if sweep.is_single else "sweep"
    common = f"  ({escape(' '.join(sweep.common))})" if sweep.common else ""
    return f"{kind} {escape(str(sweep.path))}{common}"


def summary(sweep: Sweep, now: float) -> str:
    """How many jobs are in which state, and since when the sweep runs."""
    counts = sweep.counts()
    parts = [f"{counts[state]} {state.value}" for state in reversed(ORDER) if counts[state]]
    begins = [job.began for job in sweep.jobs if job.began]
    if begins:
        parts.append(f"started {words.ago(now - min(begins))} ago")
    if sweep.launcher is not None:
        parts.append(f"its launcher runs here (pid {sweep.launcher})")
    return " · ".join(parts)


def cells(job: SweepJob, metric: Chosen, now: float) -> dict[str, str]:
    """The columns of a job."""
    is_starting = job.state is State.starting and job.since is not None
    elapsed = f" {words.ago(now - job.since)}" if is_starting and job.since else ""
    share = "" if job.share is None else f" ({math.floor(job.share * 100)}%)"  # 100% is the end
    found, best = metric.of(job), metric.best(job)
    values = {}
    if found is not None and best is not None:
        values = {escape(metric.name): words.number(found.last), "best": words.number(best[0])}
    return {
        "job": str(job.number),
        "state": f"{job.state.value}{elapsed}",
        "step": "" if job.step is None else f"{job.step}{share}",
        "rate": words.per_second(job.rate),
        "left": words.clock(job.left_s),
        **values,
        "overrides": escape(job.label),
    }


def notes(job: SweepJob, now: float, *, is_single: bool = False) -> list[str]:
    """Facts about a job that have no column; short lines.

    Args:
        job: The job.
        now: Unix time.
        is_single: Whether it is the only one, so that there is room for more.
    """
    found = []
    problem = problem_of(job)
    if problem:
        found.append(problem)
    if job.state is State.failed:
        found.append(f"log: {escape(str(output.path_of(job.directory, job.rank)))}")
    facts = []
    if job.attempts > 1:
        reasons = words.reasons(job.ends)  # only launchers and batch jobs record them
        facts.append(f"{job.attempts} attempts" + (f": {reasons}" if reasons else ""))
    if job.state is not State.finished:
        if job.checkpoint is not None:
            age = words.ago(job.checkpoint.age_s(now))
            facts.append(f"checkpoint {job.checkpoint.path.name}, {age} ago")
        elif job.lost_step is not None:
            facts.append(f"its checkpoint of step {job.lost_step} is gone")
        elif job.step:
            facts.append("no checkpoint yet")
        if job.state.is_active and job.save_every_s is not None:
            facts.append(f"saves every {words.ago(job.save_every_s)}")
        if job.slurm_id:
            facts.append(f"Slurm {job.slurm_id}")
        if job.node and job.state.is_active:
            facts.append(f"on {job.node}")
    if facts:
        found.append(" · ".join(facts))
    return [*found, *job.missing]


def problem_of(job: SweepJob) -> str:
    """The last problem of a job in a few words; empty if there is none."""
    if job.hang:
        return escape(job.hang)
    if job.state is State.finished:
        return escape(job.start_problem)
    at = f"at {job.frame}" if job.frame else ""
    waits = f"waits: {job.waits_for}" if job.state is State.queued and job.waits_for else ""
    return escape(", ".join(filter(None, (job.because, at, waits, job.start_problem))))


def following(sweep: Sweep) -> list[tuple[str, str]]:
    """The commands that are worth typing next, and what they are for."""
    bad = [job for job in sweep.jobs if job.needs_attention]
    found = []
    names = [bad[0].number] if bad and not sweep.is_single else []
    if bad:
        what = "why it ended" if sweep.is_single else f"why job {bad[0].number} ended"
        found += [(sweep.command("why", *names), what)]
        found += [(sweep.command("logs", *names), "its output")]
    starts, _ = to_start.jobs_to_start(sweep, sweep.jobs, are_named=False, only_failed=False)
    if starts and not sweep.is_single:
        found.append((sweep.command("resume"), f"start again {words.count(len(starts), 'job')}"))
    if any(job.state.is_active for job in sweep.jobs):
        found.append((sweep.command("status --watch"), "look again every two seconds"))
    if any(job.metrics for job in sweep.jobs) and len(sweep.jobs) > 1:
        found.append((sweep.command("status --csv"), "overrides and results as a table"))
    return [(escape(command), what) for command, what in found]
