"""Figures of metrics: their curves over restarts, and overrides against the best value."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from forge.sweeps.report.axes import PALETTE, number_in, short, varying
from forge.sweeps.report.data import Report, overrides


def curves(report: Report) -> go.Figure | None:
    """The metrics over restarts; a menu chooses the metric, another one the colours."""
    names = [name for name in report.metrics if any(name in job.curves for job in report.jobs)]
    if not names:
        return None
    keys = varying(report)
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
                y=[short(value) for value in line.values],
                mode="lines" if len(line.steps) > 1 else "markers",
                line={"width": 1.2, "color": PALETTE[number % len(PALETTE)]},
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
    scales = [("linear", "linear scale"), ("log", "log scale")]
    menus.append(_menu(0.2, [(name, "relayout", [{"yaxis.type": own}]) for own, name in scales]))
    if keys:
        menus.append(
            _menu(
                0.4,
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
        legend={"visible": len(report.jobs) <= 20},
    )
    return figure


def parallel(report: Report) -> go.Figure | None:
    """Overrides against the best value of the metric, as parallel coordinates."""
    keys = varying(report)
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
        numbers = [number_in(text) for text in texts]
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
    kind = "highest" if report.chosen.is_higher else "lowest"
    dimensions.append({"label": f"{kind} {report.chosen.name}", "values": values})
    line = {
        "color": values,
        "colorscale": "Viridis",
        "showscale": True,
        "reversescale": kind == "lowest",
    }
    return go.Figure(go.Parcoords(line=line, dimensions=dimensions)).update_layout(height=420)


def _colour(report: Report, key: str, value: str) -> str:
    known = sorted({overrides(job.job).get(key, "") for job in report.jobs}, key=_by_number)
    return PALETTE[known.index(value) % len(PALETTE)]


def _by_number(text: str) -> tuple[float, str]:
    number = number_in(text)
    return (math.inf if number is None else number), text


def _menu(x: float, entries: list[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    buttons = [{"label": label, "method": method, "args": args} for label, method, args in entries]
    return {"buttons": buttons, "x": x, "xanchor": "left", "y": 1.15, "yanchor": "top"}
