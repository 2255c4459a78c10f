"""Further results of a rehearsal: repeated steps, saves, leftovers, and untested features."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from forge.messages import truncate_list
from forge.rehearse.rehearsal import RehearsedRun

_SHOWN = 8


def lines(
    first: RehearsedRun,
    interrupted: list[RehearsedRun],
    written: list[str],
    shortened: Sequence[str] = (),
) -> Iterator[str]:
    """Sentences for the end of a rehearsal.

    Args:
        first: The first uninterrupted run.
        interrupted: The interrupted runs.
        written: Files of the working directory that the runs have written.
        shortened: Those that are shorter after an interrupted run.
    """
    events = [event for run in [first, *interrupted] for event in _events(run)]
    yield from _stops(interrupted, events)
    left = dict.fromkeys(command for run in [first, *interrupted] for command in run.left)
    for command in left:
        yield f"A process outlived the script that started it: {command[:120]}"
    if written:
        names = truncate_list(list(_by_folder(written)), _SHOWN)
        yield (
            "The runs created or changed files in the working directory, which they share. If the"
            f" script reads these files, its results can differ for that reason: {names}"
        )
    if shortened:
        yield (
            "Shorter after an interrupted run, so each start of the script seems to overwrite the"
            " file, and what earlier starts wrote is lost (open a log with mode `a`):"
            f" {truncate_list(list(_by_folder(shortened)), _SHOWN)}"
        )
    for missing in _not_exercised(first):
        yield f"Not tested, because the script has none: {missing}"


def _by_folder(files: Sequence[str]) -> Iterator[str]:
    """The files, but only the first folder of those in a folder."""
    counts = Counter(name.partition(os.sep)[0] for name in files)
    for top, count in counts.items():
        if top in files:
            yield top
        else:
            yield f"{top}{os.sep} ({count} file{'s' if count > 1 else ''})"


def _stops(interrupted: list[RehearsedRun], events: list[dict[str, Any]]) -> Iterator[str]:
    stops = [
        step - start
        for run in interrupted
        for name, step, start in run.resumed_at()
        if name != "SIGKILL" and start is not None
    ]
    longest = max((one["seconds"] for one in events if one["kind"] == "save"), default=None)
    warning_s = min((one["stop_s"] for one in events if "stop_s" in one), default=None)
    if stops:
        repeated = sum(max(0, steps) for steps in stops)
        runs = "1 run that was" if len(stops) == 1 else f"{len(stops)} runs that were"
        steps = "1 step was" if repeated == 1 else f"{repeated} steps were"
        yield f"{steps} trained twice, in {runs} stopped by a signal that allows a save"
    if longest is not None and warning_s is not None:
        fits = "fits into" if longest <= warning_s else "does not fit into"
        yield (
            f"The longest save took {longest:.2g} s, which {fits} the {warning_s:g} s that a stop"
            " can take (`resilience.shutdown.timeout_s`)"
        )


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
