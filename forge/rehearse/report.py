"""Further results of a rehearsal: repeated steps, leftovers, and untested features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge.rehearse.rehearsal import RehearsedRun


def lines(first: RehearsedRun, interrupted: list[RehearsedRun]) -> Iterator[str]:
    """Sentences for the end of a rehearsal.

    Args:
        first: The first uninterrupted run.
        interrupted: The interrupted runs.
    """
    yield from _stops(interrupted)
    left = dict.fromkeys(command for run in [first, *interrupted] for command in run.left)
    for command in left:
        yield f"A process outlived the script that started it: {command[:120]}"
    for missing in _not_exercised(first):
        yield f"Not tested, because the script has none: {missing}"


def _stops(interrupted: list[RehearsedRun]) -> Iterator[str]:
    stops = [
        step - start
        for run in interrupted
        for name, step, start in run.resumed_at()
        if name != "SIGKILL" and start is not None
    ]
    if stops:
        repeated = sum(max(0, steps) for steps in stops)
        runs = "1 run that was" if len(stops) == 1 else f"{len(stops)} runs that were"
        steps = "1 step was" if repeated == 1 else f"{repeated} steps were"
        yield f"{steps} trained twice, in {runs} stopped by a signal that allows a save"


def _not_exercised(first: RehearsedRun) -> Iterator[str]:
    events = list(_events(first))
    has_evaluated = any(event["kind"] == "evaluated" for event in events)
    if not has_evaluated and not first.is_pushed:  # a trainer evaluates inside a step
        yield "an evaluation between steps (run.every)"
    passes = [_passes(state) for state in first.states.values()]
    known = [one for one in passes if one is not None]
    if known and max(known) < 2:
        yield "a second pass through the loader"
    saves = [event for event in events if event["kind"] == "save"]
    if not any(event["reason"] == "periodic" for event in saves):
        yield "a periodic save (checkpoint.every_steps)"


def _passes(state: dict[str, Any]) -> int | None:
    """Passes begun through the loader with the most passes; None if there is no loader."""
    epochs = state.get("epochs")
    if epochs:
        return int(epochs["epoch"])
    positions = [one for one in state.get("positions", []) if one]
    return max((int(one["epoch"]) + 1 for one in positions), default=None)


def _events(run: RehearsedRun) -> Iterator[dict[str, Any]]:
    for attempt in run.history.attempts:
        yield from attempt.events
