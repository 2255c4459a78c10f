"""The texts about a job, and the table of all jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge.jobdir.job_state import State
from forge.launch.progress.view import JobView
from forge.messages import escape
from forge.sweeps.status import STYLES

if TYPE_CHECKING:
    from rich.table import Table

ACTIVE = (State.starting, State.running, State.stopping)
_RIGHT = ("job", "steps", "restarts", "rate", "left")
_FLEXIBLE = ("overrides", "remark")
_LEAST = {"state": 8, "overrides": 8, "rate": 6, "left": 7}
"""Minimum widths, so that columns do not move with every digit."""


def news(view: JobView, last: JobView | None) -> str:
    """A line about the changes since `last`; empty if there are none."""
    was = State.queued if last is None else last.state
    remark = f": {escape(view.remark)}" if view.remark else ""
    if view.state is not was and view.state.is_final:
        if last is None and view.state is State.finished:
            return ""  # it was finished before this sweep resumed
        place = f" ({escape(str(view.directory))})" if view.state is State.failed else ""
        return f"{view.state.value}{_at(view)}{remark}{place}"
    if last is not None and view.restarts > last.restarts:
        return f"restart {view.restarts}{_at(view, 'after')}{remark}"
    if view.hang and (last is None or view.hang != last.hang):
        return escape(f"{view.hang} ({view.directory})")
    is_start = was is State.queued and view.state in ACTIVE and (last is None or not view.restarts)
    return f"started {escape(view.overrides)}" if is_start else ""


def _at(view: JobView, word: str = "at") -> str:
    """The progress as ` at step 3 of 10 (30%)`; empty before training began."""
    share = f" of {view.steps} ({(view.step or 0) / view.steps:.0%})" if view.steps else ""
    return "" if view.step is None else f" {word} step {view.step}{share}"


def clock(seconds: float | None) -> str:
    """Seconds as `1:02:03`; empty if unknown."""
    if seconds is None or not 0 <= seconds < 1e8:
        return ""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def per_second(rate: float | None) -> str:
    """A rate as people read it; empty if unknown."""
    if rate is None or not 0 < rate < math.inf:
        return ""
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:.0f}/s"


def _cells(view: JobView) -> dict[str, str]:
    is_active = view.state in ACTIVE
    step = "" if view.step is None else str(view.step)
    waits = f"waiting: {view.waits_for}" if view.waits_for else ""
    return {
        "job": str(view.number),
        "state": view.state.value,
        "overrides": escape(view.overrides),
        "steps": f"{step}/{view.steps}" if step and view.steps else step,
        "restarts": str(view.restarts or ""),
        "rate": per_second(view.rate) if is_active else "",
        "left": clock(view.left_s) if is_active else "",
        "remark": escape(", ".join(filter(None, (view.remark, waits)))),
    }


def table(views: Sequence[JobView]) -> Table:
    """A header and one line for each job, without the columns that are empty for all jobs."""
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(view) for view in views]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        found.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            min_width=_LEAST.get(name),
            no_wrap=name not in _FLEXIBLE,
        )
    for row, view in zip(rows, views, strict=True):
        style = STYLES[view.state]
        styles = {"state": style, "remark": style, "restarts": "yellow"}
        cells = [
            Text(row[name], styles.get(name, ""), no_wrap=True, overflow="ellipsis")
            for name in names
        ]
        found.add_row(*cells, style="dim" if view.state is State.queued else "")
    return found
