"""The data of the report, computed from the sweep's directory before anything is drawn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge.jobdir.jsonl import Event
from forge.sweeps import attempts, curves, times
from forge.sweeps.attempts import AttemptRecord
from forge.sweeps.chosen_metric import Chosen
from forge.sweeps.curves import Curve
from forge.sweeps.job import SweepJob
from forge.sweeps.sweep import Sweep
from forge.sweeps.times import Part, Segment

MAX_METRICS = 4
_POINTS = 25_000
"""Points of all curves together: a few hundred kilobytes in the file."""
_FEWEST, _MOST = 40, 400


@dataclass
class JobReport:
    """A job, with what its ledgers say."""

    job: SweepJob
    name: str
    """Its number and overrides."""
    attempts: list[AttemptRecord]
    segments: list[Segment]
    curves: dict[str, Curve] = field(default_factory=dict)
    lost: list[tuple[AttemptRecord, int, float]] = field(default_factory=list)
    """(attempt, steps, seconds) for each attempt that ended without a save."""

    @property
    def sums(self) -> dict[Part, float]:
        """Seconds of each part of its time."""
        return times.totals(self.segments)


@dataclass
class Report:
    """A sweep."""

    sweep: Sweep
    jobs: list[JobReport]
    metrics: list[str]
    """The metrics with curves; the first is the one that is compared."""
    chosen: Chosen
    made: float
    """Unix time."""
    problems: list[str] = field(default_factory=list)


def collect(sweep: Sweep, metric: str = "", now: float | None = None) -> Report:
    """Read everything that the report of a sweep shows.

    Args:
        sweep: The sweep.
        metric: The metric to compare, as `Chosen.parse` reads it; empty: the one logged most often.
        now: Unix time; None: now.
    """
    now = time.time() if now is None else now
    chosen = Chosen.parse(metric)
    names = _metrics(sweep.jobs, chosen)
    chosen = replace(chosen, name=chosen.name or (names[0] if names else ""))
    share = _POINTS // max(len(sweep.jobs) * len(names), 1)
    most = min(max(share, _FEWEST), _MOST)
    found, problems = [], []
    for job in sweep.jobs:
        try:
            own = attempts.read(job.directory)
            lines = curves.read(job.directory, names)
        except OSError as error:
            problems.append(f"job {job.number}: {error}")
            own, lines = [], {}
        until = job.since if job.state.is_final and job.since else now
        parts = times.segments(own, None, until, is_queued=bool(job.slurm_id))
        name = f"{job.number} {job.label}".strip()
        thin = {key: line.thinned(most) for key, line in lines.items() if line.steps}
        found.append(JobReport(job, name, own, parts, thin, list(attempts.lost(own))))
        problems += [f"job {job.number}: {one}" for one in job.missing]
    return Report(sweep, found, names, chosen, now, problems)


def _metrics(jobs: Sequence[SweepJob], chosen: Chosen) -> list[str]:
    """The metrics to draw, those that most jobs have first."""
    counts = Counter(name for job in jobs for name in job.metrics)
    first = chosen.of_sweep(jobs).name
    names = sorted(counts, key=lambda name: (name != first, -counts[name], name))
    return names[:MAX_METRICS]


def events(jobs: Iterable[JobReport], *kinds: str) -> list[tuple[JobReport, AttemptRecord, Event]]:
    """All events of these kinds."""
    return [
        (job, attempt, event)
        for job in jobs
        for attempt in job.attempts
        for event in attempt.events
        if event["kind"] in kinds
    ]


def overrides(job: SweepJob) -> dict[str, Any]:
    """Key -> value of a job's overrides."""
    pairs = (one.lstrip("+~").partition("=") for one in job.overrides)
    return {key: value for key, _, value in pairs}
