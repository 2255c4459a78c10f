"""Figures of counts: what the time went into, and why attempts ended."""

from __future__ import annotations

from collections import Counter

import plotly.graph_objects as go

from forge.errors import Reason
from forge.sweeps import words
from forge.sweeps.report.axes import rows, unit_of
from forge.sweeps.report.data import Report
from forge.sweeps.report.over_time import COLOURS
from forge.sweeps.times import Part


def goodput(report: Report) -> go.Figure | None:
    """The time of each job, by its use."""
    figure = go.Figure()
    jobs = [job for job in report.jobs if job.segments]
    unit, name = unit_of(sum(job.sums.values()) for job in jobs)
    for part in Part:
        seconds = [job.sums[part] for job in jobs]
        if any(seconds):
            figure.add_bar(
                name=part.value,
                orientation="h",
                y=[job.name for job in jobs],
                x=[one / unit for one in seconds],
                marker={"color": COLOURS[part]},
                customdata=[words.clock(one) for one in seconds],
                hovertemplate="%{y}<br>" + part.value + ": %{customdata}<extra></extra>",
            )
    if not figure.data:
        return None
    figure.update_layout(barmode="stack", xaxis={"title": name}, **rows(jobs))
    return figure


def stops(report: Report) -> go.Figure | None:
    """How many attempts ended for which reason, on which node."""
    ends = Counter(
        (attempt.node or "unknown", attempt.reason)
        for job in report.jobs
        for attempt in job.attempts
        if attempt.ended is not None and attempt.reason != Reason.finished.name
    )
    if not ends:
        return None
    nodes = sorted({node for node, _ in ends})
    figure = go.Figure()
    for reason in sorted({reason for _, reason in ends}):
        figure.add_bar(
            name=words.reason(reason) or "unknown",
            x=nodes,
            y=[ends[node, reason] for node in nodes],
        )
    figure.update_layout(barmode="stack", height=320, yaxis={"title": "attempts"})
    return figure
