"""The figures of the report, drawn by plotly; each is None if there is nothing to show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any, NamedTuple

import plotly.graph_objects as go

from forge.errors import Reason
from forge.sweeps import words
from forge.sweeps.report.data import JobReport, Report, events, overrides
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
_PALETTE = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_ROW = 22
_MOST_ROWS = 1200
"""Pixels of the highest figure: with more jobs, the rows are lower."""


class Figure(NamedTuple):
    """A figure with its place in the report."""

    anchor: str
    title: str
    text: str
    """A sentence that explains it."""
    draw: Callable[[Report], go.Figure | None]


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
            base=[_time(one.begin) for _, one in own],
            x=[one.seconds * 1000 for _, one in own],
            marker={"color": COLOURS[part], "line": {"width": 0}},
            customdata=[[one.attempt, words.clock(one.seconds)] for _, one in own],
            hovertemplate="%{y}<br>" + part.value + ", attempt %{customdata[0]}: %{customdata[1]}"
            "<extra></extra>",
        )
    if not figure.data:
        return None
    figure.update_layout(barmode="overlay", xaxis={"type": "date"}, **_rows(report.jobs))
    return figure


def goodput(report: Report) -> go.Figure | None:
    """The time of each job, by its use."""
    figure = go.Figure()
    jobs = [job for job in report.jobs if job.segments]
    for part in Part:
        seconds = [job.sums[part] for job in jobs]
        if any(seconds):
            figure.add_bar(
                name=part.value,
                orientation="h",
                y=[job.name for job in jobs],
                x=[one / 3600 for one in seconds],
                marker={"color": COLOURS[part]},
                customdata=[words.clock(one) for one in seconds],
                hovertemplate="%{y}<br>" + part.value + ": %{customdata}<extra></extra>",
            )
    if not figure.data:
        return None
    figure.update_layout(barmode="stack", xaxis={"title": "hours"}, **_rows(jobs))
    return figure


def lost(report: Report) -> go.Figure | None:
    """The work between the last save and the end of each attempt that could not save."""
    rows = [(job, *one) for job in report.jobs for one in job.lost]
    if not rows:
        return None
    figure = go.Figure()
    for reason in sorted({attempt.reason for _, attempt, _, _ in rows}):
        own = [row for row in rows if row[1].reason == reason]
        figure.add_scatter(
            name=words.reason(reason) or "unknown",
            mode="markers",
            x=[_time(attempt.ended or attempt.began) for _, attempt, _, _ in own],
            y=[seconds / 60 for *_, seconds in own],
            text=[
                f"{job.name}, attempt {attempt.number}: {steps} steps"
                for job, attempt, steps, _ in own
            ],
            hovertemplate="%{text}<br>%{y:.1f} min<extra></extra>",
            marker={"size": 9},
        )
    figure.update_layout(yaxis={"title": "minutes lost", "rangemode": "tozero"}, height=320)
    return figure


def curves(report: Report) -> go.Figure | None:
    """The metrics over restarts; a menu chooses the metric, another one the colours."""
    names = [name for name in report.metrics if any(name in job.curves for job in report.jobs)]
    if not names:
        return None
    keys = _varying(report)
    figure = go.Figure()
    shown: list[str] = []
    colours: dict[str, list[str]] = {key: [] for key in keys}
    for name in names:
        for number, job in enumerate(report.jobs):
            line = job.curves.get(name)
            if line is None:
                continue
            figure.add_scattergl(
                name=job.name,
                x=list(line.steps),
                y=[_short(value) for value in line.values],
                mode="lines" if len(line.steps) > 1 else "markers",
                line={"width": 1.2, "color": _PALETTE[number % len(_PALETTE)]},
                marker={"size": 5},
                visible=name == names[0],
                hovertemplate=f"{job.name}<br>step %{{x}}: %{{y:.4g}}<extra></extra>",
            )
            shown.append(name)
            for key in keys:
                colours[key].append(_colour(report, key, overrides(job.job).get(key, "")))
    menus = [
        _menu(
            0.0,
            [
                (
                    name,
                    "update",
                    [{"visible": [one == name for one in shown]}, {"yaxis.title.text": name}],
                )
                for name in names
            ],
        )
    ]
    if keys:
        menus.append(
            _menu(
                0.3,
                [(f"colour by {key}", "restyle", [{"line.color": colours[key]}]) for key in keys],
            )
        )
        figure.update_traces(line={"width": 1.2})
        for trace, colour in zip(figure.data, colours[keys[0]], strict=True):
            trace.line.color = colour
    figure.update_layout(
        updatemenus=menus,
        height=460,
        xaxis={"title": "step"},
        yaxis={"title": names[0]},
        showlegend=len(report.jobs) <= 20,
    )
    return figure


def parallel(report: Report) -> go.Figure | None:
    """Overrides against the best value of the metric, as parallel coordinates."""
    keys = _varying(report)
    own = [
        (job, best[0])
        for job in report.jobs
        if (best := report.chosen.best(job.job)) is not None and math.isfinite(best[0])
    ]
    if not keys or len(own) < 2:
        return None
    dimensions: list[dict[str, Any]] = []
    for key in keys:
        texts = [overrides(job.job).get(key, "") for job, _ in own]
        numbers = [_number(text) for text in texts]
        if all(one is not None for one in numbers):
            known = sorted({one for one in numbers if one is not None})
            is_log = known[0] > 0 and known[-1] / known[0] >= 30
            drawn = [math.log10(one) if is_log else one for one in numbers if one is not None]
            ticks = known[:: max(len(known) // 8, 1)]
            places = [math.log10(one) if is_log else one for one in ticks]
            dimensions.append(
                {
                    "label": key,
                    "values": drawn,
                    "tickvals": places,
                    "ticktext": [f"{one:g}" for one in ticks],
                }
            )
        else:
            kinds = sorted(set(texts))
            dimensions.append(
                {
                    "label": key,
                    "values": [kinds.index(one) for one in texts],
                    "tickvals": list(range(len(kinds))),
                    "ticktext": kinds,
                }
            )
    values = [value for _, value in own]
    kind = "highest" if report.chosen.is_higher(report.chosen.name) else "lowest"
    dimensions.append({"label": f"{kind} {report.chosen.name}", "values": values})
    line = {
        "color": values,
        "colorscale": "Viridis",
        "showscale": True,
        "reversescale": kind == "lowest",
    }
    return go.Figure(go.Parcoords(line=line, dimensions=dimensions)).update_layout(height=420)


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
                x=[_time(float(event["t"])) for _, _, event in own],
                y=[job.name for job, _, _ in own],
                text=[
                    f"step {event.get('step', '?')} {str(event.get('text', ''))[:80]}"
                    for _, _, event in own
                ],
                hovertemplate="%{y}<br>%{text}<extra></extra>",
            )
    figure.update_layout(
        **_rows([job for job in report.jobs if any(one[0] is job for one in found)])
    )
    return figure


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
            x=[_time(float(event["t"])) for _, _, event in own],
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


_MOST_SAVES = 5000

FIGURES = (
    Figure(
        "timeline",
        "Timeline",
        "Each attempt of each job, coloured by what its time went into.",
        timeline,
    ),
    Figure(
        "goodput",
        "Time",
        "The time of each job by its use; the parts add up to all of it.",
        goodput,
    ),
    Figure(
        "lost",
        "Work lost",
        "Minutes of training between the last save and the end, for each"
        " attempt that ended without a save.",
        lost,
    ),
    Figure(
        "curves",
        "Metrics",
        "As an uninterrupted run would have logged them: repeated steps count once.",
        curves,
    ),
    Figure("parallel", "Overrides and the best value", "Each line is a job.", parallel),
    Figure("stops", "Stops", "Why attempts ended, by node.", stops),
    Figure("trouble", "NaNs, hangs, health", "Each mark is an event in a job's ledger.", trouble),
    Figure("saves", "Saves", "How long each save took.", saves),
)
"""All figures, in the order of the page."""


# -- helpers -----------------------------------------------------------------------------------


def _time(seconds: float) -> str:
    """Local time, as plotly's axes of dates read it."""
    local = datetime.fromtimestamp(seconds, timezone.utc).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _rows(jobs: Iterable[JobReport]) -> dict[str, Any]:
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


def _short(value: float) -> float | None:
    """A value with five digits, which are enough for a picture; None for NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _varying(report: Report) -> list[str]:
    """The overrides with more than one value."""
    values: dict[str, set[str]] = {}
    for job in report.jobs:
        for key, value in overrides(job.job).items():
            values.setdefault(key, set()).add(value)
    return [key for key, own in values.items() if len(own) > 1]


def _colour(report: Report, key: str, value: str) -> str:
    known = sorted({overrides(job.job).get(key, "") for job in report.jobs}, key=_by_number)
    return _PALETTE[known.index(value) % len(_PALETTE)]


def _by_number(text: str) -> tuple[float, str]:
    number = _number(text)
    return (math.inf if number is None else number), text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _menu(x: float, entries: list[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    buttons = [{"label": label, "method": method, "args": args} for label, method, args in entries]
    return {"buttons": buttons, "x": x, "xanchor": "left", "y": 1.15, "yanchor": "top"}
