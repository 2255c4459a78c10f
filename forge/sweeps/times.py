"""The uses of a job's time, without gaps: the parts sum to the whole.

queued     waits for a slot of its launcher, or in Slurm's queue
starting   from the start of the processes to the first step
productive steps done for the first time, and the code around them
repeated   steps that an earlier attempt had done, and lost
saving     training waits for a save
evaluating functions of `run.every`, and the code after a pass
stopping   from the request to stop, or the end of the loop, to the end of the processes
idle       between two attempts, while nothing waits in a queue: pauses, a launcher that was away
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from forge.jobdir.jsonl import Event
from forge.sweeps import ledger_tail
from forge.sweeps.attempts import AttemptRecord


class Part(Enum):
    """A use of time."""

    queued = "queued"
    starting = "starting"
    productive = "productive"
    repeated = "repeated"
    saving = "saving"
    evaluating = "evaluating"
    stopping = "stopping"
    idle = "idle"


class Segment(NamedTuple):
    """A part of a job's time."""

    part: Part
    begin: float
    """Unix time."""
    end: float
    """Unix time."""
    attempt: int
    """Number of the attempt; 0 before the first and between two attempts."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


def segments(
    attempts: Sequence[AttemptRecord], began: float | None, until: float, *, is_queued: bool
) -> list[Segment]:
    """The time of a job from its submission on, without gaps and without overlaps.

    Args:
        attempts: All attempts of the job, the oldest first.
        began: Unix time of the submission; None: of the first attempt.
        until: Unix time up to which to account for a job that has not ended.
        is_queued: Whether the job waits in Slurm's queue between two attempts.
    """
    found: list[Segment] = []
    at = began if began is not None else attempts[0].began if attempts else until
    for number, attempt in enumerate(attempts):
        waits = Part.queued if number == 0 or is_queued else Part.idle
        begin = max(attempt.began, at)  # a clock that was set back makes no negative parts
        found += _between(Segment(waits, at, begin, 0))
        later = attempts[number + 1].began if number + 1 < len(attempts) else until
        at = max(later if attempt.ended is None else min(attempt.ended, later), begin)
        found += _inside(attempt, begin, at)
    if not attempts:
        found += _between(Segment(Part.queued, at, max(until, at), 0))
    return found


def totals(found: Iterable[Segment]) -> dict[Part, float]:
    """Seconds of each part; every part is there."""
    sums = dict.fromkeys(Part, 0.0)
    for one in found:
        sums[one.part] += one.seconds
    return sums


def goodput(sums: dict[Part, float]) -> float | None:
    """Share of the time with processes that was productive or evaluated; None without any."""
    used = sum(sums[one] for one in Part if one not in (Part.queued, Part.idle))
    return (sums[Part.productive] + sums[Part.evaluating]) / used if used > 0 else None


def _between(one: Segment) -> Iterator[Segment]:
    if one.end > one.begin:
        yield one


def _inside(attempt: AttemptRecord, begin: float, end: float) -> Iterator[Segment]:
    """The segments of an attempt, in order."""
    cuts = sorted(_cuts(attempt, begin), key=lambda one: one[0])
    last, part = begin, Part.starting
    for at, following in cuts:
        at = min(max(at, last), end)
        yield from _between(Segment(part, last, at, attempt.number))
        last, part = at, following
    yield from _between(Segment(part, last, end, attempt.number))


def _cuts(attempt: AttemptRecord, began: float) -> Iterator[tuple[float, Part]]:
    """(time, the part that begins there) for each change; interruptions end with a change back."""
    events = attempt.events
    starts = [one for one in events if one["kind"] == "start"]
    if not starts:  # a command, or main without a Run: all of it counts as work
        is_run = any(one["kind"] == "run" for one in events)
        yield began, Part.starting if is_run else Part.productive
        return
    caught_up = _caught_up(events)

    def training(t: float) -> Part:
        return Part.repeated if t < caught_up else Part.productive

    begin = next((float(one["t"]) for one in events if one["kind"] == "training"), starts[0]["t"])
    yield begin, training(begin)
    for one in events:
        t = float(one["t"])
        if one["kind"] == "caught_up":
            yield t, Part.productive
        elif one["kind"] == "save" and "waited" in one:
            resumed = float(one["began"]) + float(one["waited"])  # a commit can be later
            yield float(one["began"]), Part.saving
            yield resumed, training(resumed)
        elif one["kind"] == "evaluation":
            yield t - float(one["seconds"]), Part.evaluating
            yield t, training(t)
    left = [one for one in events if one["kind"] in ledger_tail.ENDS]
    if left:
        yield float(left[-1].get("asked") or left[-1]["t"]), Part.stopping


def _caught_up(events: Sequence[Event]) -> float:
    """The time from which on steps are done for the first time; 0 if none is repeated."""
    start = next(one for one in events if one["kind"] == "start")
    before = start.get("previous_step")
    if "summary" not in start or before is None or int(before) < int(start["step"]):
        return 0.0  # nothing to repeat, or a version that does not record it
    return next((float(one["t"]) for one in events if one["kind"] == "caught_up"), float("inf"))
