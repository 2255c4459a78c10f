"""The end of a job's ledger: how far it is, how fast, and what it has logged, in one short read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.jobdir import jsonl, ledger_writer
from forge.jobdir.jsonl import Event

ENDS = ("stop", "halt", "finish", "error")
"""Kinds of events with which a process leaves a Run."""
_SUMMARY = b'"summary": {'
"""In the line of a start or a save: the metrics logged until then."""


@dataclass(frozen=True)
class Metric:
    """A value that the training logged with `run.log`, over all attempts of the job."""

    last: float
    last_step: int
    lowest: float
    lowest_step: int
    highest: float
    highest_step: int

    def best(self, *, is_higher_better: bool) -> tuple[float, int]:
        """The best value, and its step."""
        if is_higher_better:
            return self.highest, self.highest_step
        return self.lowest, self.lowest_step


@dataclass(frozen=True)
class LedgerTail:
    """The newest process of a job that entered a Run."""

    number: int = 0
    """Number of the process, over all attempts and Runs of the job; 0: there was none."""
    start: Event | None = None
    """When it began to train, and from which step."""
    end: Event | None = None
    """Why it left the Run; None if it has not, or was killed."""
    problem: Event | None = None
    """The last failed save."""
    host: str = ""
    """The machine it ran on."""
    checkpoints: str = "."
    """The Run's checkpoint directory, relative to the job's if it is below it."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    is_whole: bool = True
    """Whether `metrics` covers all of the training, and not only its last part."""
    began: float | None = None
    """Unix time at which the first process of the job entered a Run."""


def read(directory: Path) -> LedgerTail:
    """The end of the newest ledger in a job's directory.

    Raises:
        OSError: If it cannot be read.
    """
    files = ledger_writer.attempt_files(directory)
    if not files:
        return LedgerTail()
    number, path = files[-1]
    head = jsonl.head(path)
    first = next(head, None)
    found, is_whole = jsonl.tail(path, _SUMMARY)
    start = next((one for one in itertools.chain(head, found) if one["kind"] == "start"), None)
    ends = [one for one in found if one["kind"] in ENDS]
    saves = [one for one in found if one["kind"] in ("save", "save_failed")]
    is_failing = bool(saves) and saves[-1]["kind"] == "save_failed"
    has_summary = any("summary" in one for one in found)
    is_first = start is None or not start.get("resumed_from")
    run = first if first is not None and first["kind"] == "run" else {}
    host = (start or {}).get("host") or str(run.get("owner", "")).partition(" ")[0]
    return LedgerTail(
        number,
        start,
        ends[-1] if ends else None,
        saves[-1] if is_failing else None,
        str(host),
        str(run.get("checkpoints", ".")),
        _metrics(found),
        is_whole=has_summary or (is_whole and is_first),
        began=next(jsonl.head(files[0][1]), {}).get("t"),
    )


def _metrics(events: list[Event]) -> dict[str, Metric]:
    """The metrics that events add up to, the oldest first."""
    found: dict[str, Metric] = {}
    for event in events:
        if "summary" in event:
            found = {name: Metric(*values) for name, values in event["summary"].items()}
        elif event["kind"] == "metrics":
            add(found, event)
    return found


def add(found: dict[str, Metric], event: Event) -> None:
    """Add the values of one event of kind `metrics`."""
    step: int = event.get("step", 0)
    values: dict[str, Any] = event.get("values", {})
    for name, value in values.items():
        old = found.get(name)
        if old is None:
            found[name] = Metric(value, step, value, step, value, step)
            continue
        is_low, is_high = value < old.lowest, value > old.highest
        del found[name]  # the metric that was logged last comes last
        found[name] = Metric(
            value,
            step,
            value if is_low else old.lowest,
            step if is_low else old.lowest_step,
            value if is_high else old.highest,
            step if is_high else old.highest_step,
        )


def checkpoint_dirs(directory: Path) -> list[Path]:
    """The checkpoint directories of all Runs of a job, in the order in which they began."""
    found: dict[Path, None] = {}
    for _, path in ledger_writer.attempt_files(directory):
        first = next(iter(jsonl.head(path)), {})
        if first.get("kind") == "run":
            found[directory / str(first.get("checkpoints", "."))] = None
    return list(found)
