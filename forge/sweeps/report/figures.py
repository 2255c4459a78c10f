"""The figures of the report, in their order; each is None if there is nothing to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import plotly.graph_objects as go

from forge.sweeps.report import by_result, by_use, over_time
from forge.sweeps.report.data import Report


class Figure(NamedTuple):
    """A figure with its place in the report."""

    anchor: str
    title: str
    text: str
    """A sentence that explains it."""
    draw: Callable[[Report], go.Figure | None]


FIGURES = (
    Figure(
        "timeline",
        "Timeline",
        "Each attempt of each job, coloured by what its time went into.",
        over_time.timeline,
    ),
    Figure(
        "goodput",
        "Time",
        "The time of each job by its use; the parts add up to all of it.",
        by_use.goodput,
    ),
    Figure(
        "lost",
        "Work lost",
        "Training between the last save and the end, for each attempt that ended without a save.",
        over_time.lost,
    ),
    Figure(
        "curves",
        "Metrics",
        "As an uninterrupted run would have logged them: repeated steps count once.",
        by_result.curves,
    ),
    Figure("parallel", "Overrides and the best value", "Each line is a job.", by_result.parallel),
    Figure("stops", "Stops", "Why attempts ended, by node.", by_use.stops),
    Figure(
        "trouble",
        "NaNs, hangs, health",
        "Each mark is an event in a job's ledger.",
        over_time.trouble,
    ),
    Figure("saves", "Saves", "How long each save took.", over_time.saves),
)
"""All figures, in the order of the page."""
