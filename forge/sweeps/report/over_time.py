"""Figures with a time axis: attempts, lost work, NaNs and hangs, saves."""

from __future__ import annotations

import plotly.graph_objects as go

from forge.sweeps import words
from forge.sweeps.report.axes import rows, time_of, unit_of
from forge.sweeps.report.data import Report, events
from forge.sweeps.times import Part

COLOURS = {
    Part.queued: "#d9d9d9",
    Part.starting: "#fdd0a2",
    Part.productive: "#41ab5d",
    Part.repeated: "#e6550d",
    Part.saving: "#6baed6",
    Part.evaluating: "#9e9ac8",
    Part.stopping: "#fd8d3c",
    Part.idle: "#f0f0f0",
}


def timeline(report: Report) -> go.Figure | None:
    """All attempts of all jobs, coloured by what the time went into."""
    figure = go.Figure()
    for part in Part:
        own = [(job, one) for job in report.jobs for one in job.segments if one.part is part]
        if not own:
            continue
        figure.add_bar(
            name=part.value,
            orientation="h",
            y=[job.name for job, _ in own],
            base=[time_of(one.begin) for _, one in own],
            x=[one.seconds * 1000 for _, one in own],
            marker={"color": COLOURS[part], "line": {"width": 0}},
            customdata=[[one.attempt, words.clock(one.seconds)] for _, one in own],
            hovertemplate="%{y}<br>" + part.value + ", attempt %{customdata[0]}: %{customdata[1]}"
            "<extra></extra>",
        )
    if not figure.data:
        return None
    figure.update_layout(barmode="overlay", xaxis={"type": "date"}, **rows(report.jobs))
    return figure


def lost(report: Report) -> go.Figure | None:
    """The work between the last save and the end of each attempt that could not save."""
    ends = [(job, *one) for job in report.jobs for one in job.lost]
    if not ends:
        return None
    figure = go.Figure()
    unit, name = unit_of(seconds for *_, seconds in ends)
    for reason in sorted({attempt.reason for _, attempt, _, _ in ends}):
        own = [row for row in ends if row[1].reason == reason]
        figure.add_scatter(
            name=words.reason(reason) or "unknown",
            mode="markers",
            x=[time_of(attempt.ended or attempt.began) for _, attempt, _, _ in own],
            y=[seconds / unit for *_, seconds in own],
            text=[
                f"{job.name}, attempt {attempt.number}: {steps} steps"
                for job, attempt, steps, _ in own
            ],
            hovertemplate="%{text}<br>%{y:.3g} " + name + "<extra></extra>",
            marker={"size": 9},
        )
    figure.update_layout(yaxis={"title": f"{name} lost", "rangemode": "tozero"}, height=320)
    return figure


_TROUBLE = {
    "nan": "NaN or Inf",
    "skip": "skipped update",
    "rollback": "rollback",
    "hang": "hang",
    "health": "health check",
    "save_failed": "failed save",
    "no hang": "slow, not hanging",
}


def trouble(report: Report) -> go.Figure | None:
    """NaNs, hangs, failed health checks and failed saves, over time."""
    found = events(report.jobs, *_TROUBLE)
    if not found:
        return None
    figure = go.Figure()
    for kind, name in _TROUBLE.items():
        own = [one for one in found if one[2]["kind"] == kind]
        if own:
            figure.add_scatter(
                name=name,
                mode="markers",
                marker={"size": 8},
                x=[time_of(float(event["t"])) for _, _, event in own],
                y=[job.name for job, _, _ in own],
                text=[
                    f"step {event.get('step', '?')} {str(event.get('text', ''))[:80]}"
                    for _, _, event in own
                ],
                hovertemplate="%{y}<br>%{text}<extra></extra>",
            )
    figure.update_layout(
        **rows([job for job in report.jobs if any(one[0] is job for one in found)])
    )
    return figure


_MOST_SAVES = 2000
"""Marks of one reason: a browser draws more of them slowly, and they cover each other."""


def saves(report: Report) -> go.Figure | None:
    """Size and duration of each save."""
    found = [one for one in events(report.jobs, "save") if one[2].get("seconds")]
    if not found:
        return None
    figure = go.Figure()
    for reason in sorted({str(event.get("reason", "")) for _, _, event in found}):
        own = [one for one in found if str(one[2].get("reason", "")) == reason][:_MOST_SAVES]
        speeds = [event.get("bytes", 0) / 2**20 / event["seconds"] for _, _, event in own]
        figure.add_scattergl(
            name=reason,
            mode="markers",
            marker={"size": 6},
            x=[time_of(float(event["t"])) for _, _, event in own],
            y=[float(event["seconds"]) for _, _, event in own],
            text=[
                f"{job.name}, {event.get('path')}: {event.get('bytes', 0) / 2**20:.1f} MiB,"
                f" {speed:.0f} MiB/s"
                for (job, _, event), speed in zip(own, speeds, strict=True)
            ],
            hovertemplate="%{text}<br>%{y:.2f} s<extra></extra>",
        )
    figure.update_layout(yaxis={"title": "seconds", "rangemode": "tozero"}, height=320)
    return figure
