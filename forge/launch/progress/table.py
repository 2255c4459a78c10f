"""How a job is put into words, and many jobs into a table that fits its terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from forge.launch.progress.view import JobView, State

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

ACTIVE = (State.starting, State.running, State.stopping)
STYLES = dict(zip(State, ("dim", "cyan", "cyan", "yellow", "green", "red", "yellow"), strict=True))
_RIGHT = ("job", "steps", "restarts", "rate", "left")
_FIRST_TO_GO = ("remark", "rate", "progress", "left", "restarts", "steps")
_LEAST = {"state": 8, "rate": 6, "left": 7}  # else the columns would jump with every digit
_BAR = 12


class News(NamedTuple):
    """What to say about a job's change."""

    text: str
    is_in_table: bool = False
    """Whether a table that is on the screen says it already."""


def news(view: JobView, last: JobView | None) -> News | None:
    """What there is to say since `last`; None where there is nothing."""
    was = State.queued if last is None else last.state
    remark = f": {escape(view.remark)}" if view.remark else ""
    if view.state is not was and view.state is State.finished:
        if last is None:
            return None  # it had before this sweep resumed
        return News(f"finished{at(view)}", is_in_table=True)
    if view.state is not was and view.state.is_final:
        place = f" ({escape(str(view.directory))})" if view.state is State.failed else ""
        return News(f"{view.state.value}{at(view)}{remark}{place}")
    if last is not None and view.restarts > last.restarts:
        return News(f"restart {view.restarts}{at(view)}{remark}")
    is_start = was is State.queued and view.state in ACTIVE and (last is None or not view.restarts)
    return News(f"started {escape(view.overrides)}", is_in_table=True) if is_start else None


def at(view: JobView) -> str:
    """Where it stands: ` at step 3 of 10 (30%)`; empty before training began."""
    share = f" of {view.steps} ({(view.step or 0) / view.steps:.0%})" if view.steps else ""
    return "" if view.step is None else f" at step {view.step}{share}"


def escape(text: str) -> str:
    """The text without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def waiting(view: JobView) -> str:
    """Why it waits in a cluster's queue; empty where it does not."""
    return f"waiting: {view.waits_for}" if view.waits_for else ""


def clock(seconds: float | None) -> str:
    """Seconds as `1:02:03`; empty where nobody knows."""
    if seconds is None or not 0 <= seconds < 1e8:
        return ""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def per_second(rate: float | None) -> str:
    """A rate as people read it; empty where nobody knows."""
    if rate is None or not 0 < rate < math.inf:
        return ""
    return f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s" if rate >= 1 else f"{rate:.2g}/s"


def text(*parts: tuple[str, str]) -> Text:
    """Pieces of (text, style) as one line of rich's."""
    from rich.text import Text

    return Text.assemble(*parts, overflow="crop", no_wrap=True)


def _shorten(text: str, width: int) -> str:
    """Cut from the middle, as overrides often differ in their ends."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    head = set_cell_size(text[:width], width // 2).rstrip()
    tail = set_cell_size(text[: -width - 1 : -1], width - 1 - cell_len(head)).rstrip()[::-1]
    return f"{head}…{tail}"


@dataclass(frozen=True)
class _Cell:
    """A text that takes as much of its column as there is, on one line."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        return Measurement(1, cell_len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield text((_shorten(self.text, options.max_width), self.style))


def _cells(view: JobView) -> dict[str, str]:
    is_active, step = view.state in ACTIVE, "" if view.step is None else str(view.step)
    if step and view.steps:
        step = f"{step.rjust(len(str(view.steps)))}/{view.steps}"
    return {
        "job": str(view.number),
        "state": view.state.value,
        "overrides": escape(view.overrides),
        "progress": " " * _BAR if view.steps and view.step is not None else "",
        "steps": step,
        "restarts": str(view.restarts or ""),
        "rate": per_second(view.rate) if is_active else "",
        "left": clock(view.left_s) if is_active else "",
        "remark": escape(", ".join(filter(None, (view.remark, waiting(view))))),
    }


def table(views: Sequence[JobView], width: int) -> Table:
    """A header and one line per job; columns that have no room are left out."""
    from rich.cells import cell_len
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    cells = [_cells(view) for view in views]
    gap, enough = (2, 24) if width >= 60 else (1, 16)
    floors = {"overrides": enough, "remark": 20}
    least = {  # what a column needs; those without anything are left out
        name: min(
            max(cell_len(name), _LEAST.get(name, 0), *(cell_len(row[name]) for row in cells)),
            floors.get(name, width),
        )
        for name in cells[0]
        if any(row[name] for row in cells)
    }
    for name in _FIRST_TO_GO:
        if sum(least.values()) + gap * (len(least) - 1) > width:
            least.pop(name, None)
    found = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name, size in least.items():
        found.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            min_width=None if name in floors else size,
            no_wrap=name not in floors,
        )
    for row, view in zip(cells, views, strict=True):
        style = STYLES[view.state]
        styles = {"state": style, "remark": style, "restarts": "yellow"}
        rest = "dim" if view.state is State.queued else ""
        shown: list[RenderableType] = [
            _Cell(row[name], rest or styles.get(name, "")) for name in least
        ]
        if row["progress"] and "progress" in least:
            bar = ProgressBar(
                view.steps or 1, view.step or 0, _BAR, style="dim", complete_style=style
            )
            shown[list(least).index("progress")] = bar
        found.add_row(*shown)
    return found
