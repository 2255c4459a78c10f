"""What a rehearsal has seen besides: repeated steps, saves, leftovers, what was not exercised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge.messages import few
from forge.rehearse.rehearsal import Run

_SHOWN = 8


def lines(first: Run, disturbed: list[Run], written: list[str]) -> Iterator[str]:
    """Sentences for the end of a rehearsal."""
    events = [event for run in [first, *disturbed] for event in _events(run)]
    yield from _stops(disturbed, events)
    left = dict.fromkeys(command for run in [first, *disturbed] for command in run.left)
    for command in left:
        yield f"left behind: a process outlives the script that started it: {command[:120]}"
    if written:
        names = few(written, _SHOWN)
        yield f"new or changed in the working directory, which every run writes to: {names}"
    missing = list(_not_exercised(first))
    if missing:
        yield f"not exercised: {'; '.join(missing)}"


def _stops(disturbed: list[Run], events: list[dict[str, Any]]) -> Iterator[str]:
    stops = [
        step - start
        for run in disturbed
        for name, step, start in run.resumed_at()
        if name != "SIGKILL" and start is not None
    ]
    longest = max((one["seconds"] for one in events if one["kind"] == "save"), default=None)
    warning_s = min((one["stop_s"] for one in events if "stop_s" in one), default=None)
    told = []
    if stops:
        repeated = sum(max(0, one) for one in stops)
        told.append(f"{repeated} steps repeated after {len(stops)} stop{'s' * (len(stops) > 1)}")
    if longest is not None and warning_s is not None:
        fits = "of" if longest <= warning_s else "which is more than"
        told.append(f"the longest save took {longest:.2g} s, {fits} the {warning_s:g} s for a stop")
    if told:
        yield "; ".join(told)


def _not_exercised(first: Run) -> Iterator[str]:
    events = list(_events(first))
    if not any(event["kind"] == "evaluated" for event in events):
        yield "an evaluation between steps (run.every, or what follows a pass)"
    passes = [_passes(state) for state in first.states.values()]
    known = [one for one in passes if one is not None]
    if known and max(known) < 2:
        yield "a second pass through the loader"
    saves = [event for event in events if event["kind"] == "save"]
    if not any(event["reason"] == "periodic" for event in saves):
        yield "a periodic save (checkpoint.every_steps)"


def _passes(state: dict[str, Any]) -> int | None:
    """Passes begun through the loader that was read most; None without one."""
    epochs = state.get("epochs")
    if epochs:
        return int(epochs["epoch"])
    positions = [one for one in state.get("positions", []) if one]
    return max((int(one["epoch"]) + 1 for one in positions), default=None)


def _events(run: Run) -> Iterator[dict[str, Any]]:
    for attempt in run.history.attempts:
        yield from attempt.events
