"""The attempts of a job, from the ledger of its wrapper and the ledgers of its Runs.

A wrapper records when it starts the job's processes, and why they ended. A process records what it
did in `forge.Run`. A job without a wrapper has only the second, and each entry of a Run counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge.jobdir import jsonl, ledger, ledger_writer
from forge.jobdir.job_files import job_ledger
from forge.jobdir.jsonl import Event
from forge.jobdir.ledger import Progress
from forge.sweeps import ledger_tail


@dataclass(frozen=True)
class AttemptRecord:
    """One start of a job, and its end."""

    number: int
    """From 1, over all starts of the job."""
    began: float
    """Unix time."""
    ended: float | None = None
    """Unix time; None if it runs, or if nothing recorded its end."""
    reason: str = ""
    """Name of a `forge.errors.Reason`; empty if it runs, or if nothing recorded its end."""
    text: str = ""
    """The reason for people, with details."""
    code: int | None = None
    """Exit code, or minus the signal that killed the process."""
    node: str = ""
    start_step: int | None = None
    """Steps done when its loop began; None if it had none, or did not come that far."""
    end_step: int | None = None
    """The last step that it is known to have begun."""
    saves: int = 0
    """Checkpoints that it has committed."""
    saved_step: int | None = None
    """The step of its last checkpoint."""
    events: list[Event] = field(default_factory=list, repr=False)
    """The events of its processes and of its wrapper, without metrics, in order."""


def read(directory: Path) -> list[AttemptRecord]:
    """All attempts of the job in a directory, the oldest first; reads its whole ledgers.

    Raises:
        OSError: If a ledger cannot be read.
    """
    runs = []
    for number, path in ledger_writer.attempt_files(directory):
        found = [one for one in jsonl.events(path) if one["kind"] != "metrics"]
        if found:
            runs.append((float(found[0]["t"]), found))
            _complete(found, number, runs[:-1], ledger.read_progress(directory))
    history = [one for one in jsonl.events(job_ledger(directory)) if "t" in one]
    parts = by_attempt(history)
    if not parts:
        return [_of(number, [], [own]) for number, (_, own) in enumerate(runs, 1)]
    return [
        _of(number, own, [run for t, run in runs if _is_in(t, own, parts[number:])])
        for number, own in enumerate(parts, 1)
    ]


def lost(own: Sequence[AttemptRecord]) -> Iterator[tuple[AttemptRecord, int, float]]:
    """The work between the last save and the end, of attempts that ended without a save.

    Yields:
        (attempt, steps, seconds).
    """
    for attempt in own:
        if attempt.ended is None or attempt.reason == "finished":
            continue
        kinds = {event["kind"] for event in attempt.events}
        if "stop" in kinds or "finish" in kinds or attempt.end_step is None:
            continue
        saves = [one for one in attempt.events if one["kind"] in ("save", "start")]
        if saves:
            steps = attempt.end_step - int(saves[-1]["step"])
            yield attempt, max(steps, 0), max(attempt.ended - float(saves[-1]["t"]), 0.0)


def by_attempt(history: list[Event]) -> list[list[Event]]:
    """The events of a job's wrapper, from the start of each attempt to that of the next one."""
    starts = [n for n, one in enumerate(history) if one["kind"] == "attempt"]
    ends = [*starts, len(history)][1:]
    return [history[begin:end] for begin, end in zip(starts, ends, strict=True)]


def _complete(
    own: list[Event],
    number: int,
    before: list[tuple[float, list[Event]]],
    progress: Progress | None,
) -> None:
    """Add the last step that a process has begun: a kill leaves no event of it.

    The next process of the same Run writes it down at its start; that of the newest process is in
    the progress file.
    """
    start = next((one for one in own if one["kind"] == "start"), None)
    if start is not None and start.get("previous_step") is not None:
        same = [run for _, run in before if run[0].get("checkpoints") == own[0].get("checkpoints")]
        if same and not any(one["kind"] in ledger_tail.ENDS for one in same[-1]):
            last = same[-1][-1]
            same[-1].append({"t": last["t"], "kind": "last step", "step": start["previous_step"]})
    if progress is not None and progress.attempt == number and start is not None:
        own.append({"t": progress.began, "kind": "last step", "step": progress.step})


def _is_in(t: float, own: Sequence[Event], later: Sequence[Sequence[Event]]) -> bool:
    """Whether a time is in an attempt, and not before it or in a later one."""
    return t >= own[0]["t"] and not (later and t >= later[0][0]["t"])


def _of(number: int, own: list[Event], runs: list[list[Event]]) -> AttemptRecord:
    """An attempt, from the events of its wrapper and of its processes."""
    begin = own[0] if own else runs[0][0]
    inner = [event for run in runs for event in run]
    end = end_of(own)
    left = next((one for one in reversed(inner) if one["kind"] in ledger_tail.ENDS), None)
    if end is None and not own:
        end = left
    starts = [one for one in inner if one["kind"] == "start"]
    saves = [one for one in inner if one["kind"] == "save"]
    steps = [int(one["step"]) for one in inner if isinstance(one.get("step"), int)]
    reason = "" if end is None else str(end.get("reason") or _REASONS.get(end["kind"], ""))
    return AttemptRecord(
        number,
        float(begin["t"]),
        None if end is None else float(end["t"]),
        reason,
        "" if end is None else str(end.get("text") or end.get("because") or ""),
        None if end is None else end.get("code"),
        str(_node(own, end) or (starts[0].get("host", "") if starts else "")),
        int(starts[0]["step"]) if starts else None,
        max(steps, default=None),
        len(saves),
        int(saves[-1]["step"]) if saves else None,
        sorted([*own, *inner], key=lambda one: float(one["t"])),
    )


def end_of(own: Sequence[Event]) -> Event | None:
    """The event of the end of an attempt; None if it runs, or if nothing recorded its end.

    The wrapper of a lost node cannot record an end. The next wrapper does, as it requeues the job.
    """
    ends = [one for one in own if one["kind"] == "end"]
    return next(iter(ends or [one for one in own if one["kind"] == "requeue"]), None)


def _node(own: Sequence[Event], end: Event | None) -> str:
    """The node that ended an attempt, or else its nodes, by Slurm's names."""
    return str((end or {}).get("node") or (own[0].get("nodes") if own else "") or "")


_REASONS = {"finish": "finished"}
