"""Draws a table of jobs as lines with styles: for a terminal of a width, or for a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forge.sweeps.status import FLEXIBLE, RIGHT, STYLES, JobRow, Table

_GAP = 2
_INDENT = 6
_LEAST = 12
"""Columns of the flexible column, at least."""


class Line(NamedTuple):
    """A line of output and its style, in rich's words; empty: none."""

    text: str
    style: str = ""


def lines(table: Table, width: int | None) -> list[Line]:
    """The whole table.

    Args:
        table: What to draw.
        width: Columns of the terminal; None: of any width, and each job is one line.
    """
    found = [*wrapped(table.title, width, "bold"), *wrapped(table.summary, width)]
    if table.rows:
        found += [Line(""), *rows(table.rows, width)]
    found += [Line(text, "dim") for text in table.remarks]
    if table.next and width is not None:
        longest = max(len(command) for command, _ in table.next)
        found.append(Line(""))
        found += [Line(f"{command:{longest}}  {what}", "dim") for command, what in table.next]
    return found


def rows(found: Sequence[JobRow], width: int | None) -> Iterator[Line]:
    """A header and a line for each job, without the columns that are empty for all jobs."""
    names: dict[str, None] = {}
    for row in found:
        names |= dict.fromkeys(row.cells)
    names = {name: None for name in names if any(row.cells.get(name) for row in found)}
    order = [name for name in names if name not in FLEXIBLE]
    order += [name for name in names if name in FLEXIBLE]
    widths = {
        name: max(len(name), *(len(row.cells.get(name, "")) for row in found)) for name in order
    }
    if width is not None and order and order[-1] in FLEXIBLE:
        used = sum(widths[name] + _GAP for name in order[:-1])
        widths[order[-1]] = max(min(widths[order[-1]], width - used), _LEAST)

    def drawn(cells: dict[str, str]) -> str:
        parts = []
        for name in order:
            text, size = cells.get(name, ""), widths[name]
            text = text if len(text) <= size else f"{text[: size - 1]}…"
            parts.append(f"{text:>{size}}" if name in RIGHT else f"{text:<{size}}")
        return (" " * _GAP).join(parts).rstrip()

    yield Line(drawn({name: name for name in order}), "dim")
    for row in found:
        style = STYLES[row.job.state]
        if width is None:
            notes = "; ".join(row.notes)
            yield Line(f"{drawn(row.cells)}{'  ' if notes else ''}{notes}", style)
            continue
        yield Line(drawn(row.cells), style)
        for note in row.notes:
            for line in textwrap.wrap(note, max(width - _INDENT, 20), break_on_hyphens=False):
                yield Line(f"{'':{_INDENT}}{line}", "dim")


def wrapped(text: str, width: int | None, style: str = "") -> list[Line]:
    """A text as lines of at most `width` columns."""
    if width is None or len(text) <= width:
        return [Line(text, style)]
    found = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return [Line(one, style) for one in found]
