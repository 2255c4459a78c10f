"""Colours, rows and values of the figures of the report, as plotly reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from forge.sweeps.report.data import JobReport, Report, overrides

PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_ROW = 22
_MOST_ROWS = 1200
"""Pixels of the highest figure: with more jobs, the rows are lower."""


def time_of(seconds: float) -> str:
    """Local time, as plotly's axes of dates read it."""
    local = datetime.fromtimestamp(seconds, timezone.utc).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def rows(jobs: Iterable[JobReport]) -> dict[str, Any]:
    """The layout of a figure with a row for each job, the first one on top."""
    names = [job.name for job in jobs]
    height = 120 + min(_ROW * max(len(names), 2), _MOST_ROWS)
    axis = {
        "autorange": "reversed",
        "type": "category",
        "categoryorder": "array",
        "categoryarray": names,
        "automargin": True,
    }
    return {"yaxis": axis, "height": height, "bargap": 0.25}


def short(value: float) -> float | None:
    """A value with five digits, which are enough for a picture; None for NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def varying(report: Report) -> list[str]:
    """The overrides with more than one value."""
    values: dict[str, set[str]] = {}
    for job in report.jobs:
        for key, value in overrides(job.job).items():
            values.setdefault(key, set()).add(value)
    return [key for key, own in values.items() if len(own) > 1]


def number_in(text: str) -> float | None:
    """The number that an override is, if it is one."""
    try:
        return float(text)
    except ValueError:
        return None


_UNITS = ((3600.0, "hours"), (60.0, "minutes"))


def unit_of(seconds: Iterable[float]) -> tuple[float, str]:
    """Seconds of the unit in which the longest duration is readable, and its name."""
    longest = max(seconds, default=0.0)
    return next((one for one in _UNITS if longest >= one[0]), (1.0, "seconds"))
