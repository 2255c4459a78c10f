"""The eight jobs of `showcase.py`: their disturbances, the expected ends, and the actual ends."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cluster import Cluster
from slurm_apps import SlurmJob

from forge.jobdir import ledger
from forge.jobdir.job_files import read_json
from forge.process import processes

ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
HEADER = (
    *("job", "options of its own", "what struck it, after how many steps", "attempts"),
    *("Restarts", "requeued by", "steps repeated", "Slurm", "weights and losses"),
)


@dataclass(frozen=True)
class Case:
    """One job of the sweep; its seed is its place in `CASES`."""

    fate: str
    partition: str = "low"
    node: str = "n2"
    minutes: int = 10

    @property
    def dies(self) -> bool:
        """Whether the user cancels the job."""
        return "cancelled" in self.fate


CASES = (
    Case("preempted"),
    Case("preempted"),
    Case("preempted", partition="zero"),
    Case("preempted", partition="zero"),
    Case("cancelled while it saves"),
    Case("time limit", node="n1", minutes=2),
    Case("killed", node="n1"),
    Case("cancelled", node="n1"),
)
OPTIONS = {"partition": "partition", "nodelist": "node", "timeout_min": "minutes"}
"""A key of `resilience.slurm` -> the field of a case with its value."""


class Stop(NamedTuple):
    """An attempt that was followed by another one."""

    is_cooperative: bool
    """Whether the training process stopped by itself, having saved."""
    repeated: int
    """Steps that the attempt had completed, and the next one repeated."""


@dataclass
class Facts:
    """The end of a job, as recorded by Slurm, its wrapper and its training."""

    shown: dict[str, str]
    attempts: int
    """Number of tasks that were started."""
    by_us: int
    """Requeues by the job's wrapper."""
    counts: dict[str, int]
    stops: list[Stop]
    digest: str
    """sha256 of the bits of the job's weights; empty if there are no weights."""
    metrics: dict[int, dict[str, float]]

    @property
    def restarts(self) -> int:
        """How often it was requeued, by Slurm's own count."""
        return int(self.shown["Restarts"])


@dataclass
class Job(SlurmJob):
    """One job of the disturbed sweep, or of the undisturbed one."""

    cluster: Cluster | None
    number: int
    directory: Path
    blows: list[tuple[str, int]] = field(default_factory=list)
    """(kind of the disturbance, number of steps before it)."""
    shown_last: dict[str, str] = field(default_factory=dict)
    """Slurm's record of the job after its end, kept since Slurm deletes it."""

    @property
    def case(self) -> Case:
        return CASES[self.number]

    def stand(self) -> tuple[int, int]:
        """(attempt that trained last, steps done)."""
        progress = ledger.read_progress(self.directory)
        return (progress.attempt, progress.step) if progress else (0, 0)

    def poll(self) -> None:
        """Keep Slurm's record once the job has ended."""
        if not self.shown_last and self.state.get("state") in ("finished", "stopped", "failed"):
            shown = self.shown
            if shown["JobState"] in ENDED:
                self.shown_last = shown

    def is_suspended(self) -> bool:
        """Whether the job's task is suspended; False if there is no task."""
        try:
            return processes.is_suspended(self.task)
        except (StopIteration, OSError):
            return False

    def saving(self) -> str:
        """Name of the checkpoint that is being written; empty if there is none."""
        try:
            found = (self.directory / "checkpoints").glob(".work_*/step_*")
            return next((path.name for path in found), "")
        except OSError:
            return ""

    def stop_events(self) -> list[dict[str, Any]]:
        """The `stop` events in the ledger of the job's training."""
        attempts = ledger.read(self.directory).attempts
        return [event for one in attempts for event in one.events if event["kind"] == "stop"]

    def facts(self) -> Facts:
        """Collect the facts, at the end of the job."""
        told = [one["kind"] for one in self.told]
        history = ledger.read(self.directory)
        return Facts(
            self.shown_last,
            told.count("attempt"),
            told.count("requeued"),
            self.counts,
            stops(history.attempts),
            _digest(self.directory / "weights.pt"),
            history.metrics,
        )


def stops(attempts: list[ledger.AttemptLog]) -> list[Stop]:
    """The stops, derived from each attempt and the start of the next one."""
    found = []
    begun = [one for one in attempts if any(event["kind"] == "start" for event in one.events)]
    for one, two in itertools.pairwise(begun):
        start = next(event for event in two.events if event["kind"] == "start")
        repeated = start["previous_step"] - start["step"]
        found.append(Stop(any(event["kind"] == "stop" for event in one.events), repeated))
    return found


def _digest(path: Path) -> str:
    if not path.exists():
        return ""
    state = torch.load(path, weights_only=True)
    whole = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def problems_of(case: Case, facts: Facts, undisturbed: Facts | None, num_urgent: int) -> list[str]:
    """All differences from the expected end.

    Args:
        case: The job's case.
        facts: The actual end of the job.
        undisturbed: The same training without disturbances; None for a job that is cancelled.
        num_urgent: Number of urgent jobs that were started on the job's node while it trained.
    """
    found: list[str] = []

    def expect(what: str, is_value: object, value: object) -> None:
        if is_value != value:
            found.append(f"{what}: {is_value}, not {value}")

    counts = facts.counts
    expect("JobState", facts.shown.get("JobState"), "CANCELLED" if case.dies else "COMPLETED")
    if undisturbed is None:
        expect("weights", facts.digest, "")
    else:
        expect("bits of weights", facts.digest, undisturbed.digest)
        if facts.metrics != undisturbed.metrics:
            found.append("other losses were logged")
    # Each kind of requeue has one owner, and a disturbance causes one requeue.
    is_killed, is_limited = case.fate == "killed", case.fate == "time limit"
    if is_limited:
        if not facts.restarts:
            found.append("the time limit was not hit")
        expect("counted time limits", counts["timeouts"], facts.restarts)
    else:
        expect("Restarts", facts.restarts, num_urgent)
        expect("counted time limits", counts["timeouts"], 0)
        expect("counted preemptions", counts["preemptions"], num_urgent)
    expect("requeues by forge", facts.by_us, 0 if case.partition == "zero" else facts.restarts)
    expect("counted failures", counts["failures"], int(is_killed))
    expect("attempts", facts.attempts, 1 + facts.restarts + is_killed)
    killed = [stop for stop in facts.stops if not stop.is_cooperative]
    expect("attempts without time to save", len(killed), int(is_killed))
    for stop in facts.stops:
        if stop.is_cooperative and stop.repeated > 1:
            found.append(f"{stop.repeated} steps repeated after a save at a stop")
    return found


def row(job: Job, facts: Facts, undisturbed: Facts | None) -> list[str]:
    """A row of the table."""
    case = job.case
    options = f"seed={job.number} {case.partition}, {case.node}, {case.minutes} min"
    by_slurm = facts.restarts - facts.by_us
    owners = [f"{name} {n}" for name, n in (("forge", facts.by_us), ("Slurm", by_slurm)) if n]
    repeated = [f"{one.repeated}{'' if one.is_cooperative else ' (killed)'}" for one in facts.stops]
    if undisturbed is None:
        result = "stays cancelled" if not facts.digest else "WENT ON"
    else:
        is_same = facts.digest == undisturbed.digest and facts.metrics == undisturbed.metrics
        result = f"{'IDENTICAL' if is_same else 'DIFFERENT'} {facts.digest[:8]}"
    return [
        str(job.number),
        options,
        _blows(job.blows),
        str(facts.attempts),
        str(facts.restarts),
        ", ".join(owners) or "-",
        ", ".join(repeated) or "-",
        facts.shown.get("JobState", "?"),
        result,
    ]


def _blows(blows: list[tuple[str, int]]) -> str:
    steps: dict[str, list[str]] = {}
    for what, step in blows:
        steps.setdefault(what, []).append(str(step))
    return "; ".join(f"{what} ({', '.join(after)})" for what, after in steps.items())


def summary(facts: list[Facts]) -> str:
    """The totals of the sweep: requeues, stops and repeated steps."""
    restarts, by_us = sum(one.restarts for one in facts), sum(one.by_us for one in facts)
    stops = [stop for one in facts for stop in one.stops if stop.is_cooperative]
    most = max((stop.repeated for stop in stops), default=0)
    return (
        f"{restarts} requeues: {by_us} by forge, {restarts - by_us} by Slurm."
        f" {len(stops)} cooperative stops that were gone on from: at most {most} steps repeated."
    )


def table(rows: list[list[str]], header: Sequence[str] = HEADER) -> str:
    """The table as text, with aligned columns."""
    lines = [list(header), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return "\n".join(padded)


def jobs_of(sweep: Path, cluster: Cluster | None) -> dict[int, Job]:
    """The jobs of a sweep that exist so far, by their seeds."""
    found = {}
    for path in sweep.glob("*/.forge/plan.json"):
        overrides = (read_json(path) or {}).get("overrides", [])
        for one in overrides:
            name, _, value = one.partition("=")
            if name == "seed":
                found[int(value)] = Job(cluster, int(value), path.parent.parent)
    return found
