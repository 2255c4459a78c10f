"""The demo's picture: a timeline of the attempts, above the loss curves of both sweeps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from demo_sweep import Attempt, Fault, Job, Sweep
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

matplotlib.use("Agg")

# The uninterrupted sweep is light and broad; the interrupted one is dark and narrow, on top.
COLOURS = (("#9ecae1", "#08519c"), ("#b7e0a8", "#1b7837"))
"""(uninterrupted, interrupted) for each job."""
AGAIN, STARTING = "#fd8d3c", "#d4d4d4"
ASKED, KILLED = "#7b3294", "#cb181d"
SMOOTHING_STEPS = 21


def draw(uninterrupted: Sweep, interrupted: Sweep, faults: list[Fault], path: Path) -> Path:
    """Write the picture."""
    figure, (timeline, curves) = plt.subplots(
        2, 1, figsize=(11, 9), height_ratios=[5, 7], layout="constrained"
    )
    _draw_timeline(timeline, uninterrupted, interrupted, faults)
    _draw_curves(curves, uninterrupted, interrupted, faults)
    for axes in (timeline, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def _draw_timeline(
    axes: Any, uninterrupted: Sweep, interrupted: Sweep, faults: list[Fault]
) -> None:
    lanes: list[str] = []
    for number, colours in enumerate(COLOURS):
        for sweep, colour, ink in zip(
            (uninterrupted, interrupted), colours, ("black", "white"), strict=True
        ):
            lane, job = -len(lanes), sweep.jobs[number]
            for attempt in job.attempts(faults):
                _draw_attempt(axes, lane, attempt, sweep.started, colour, ink)
            lanes.append(f"{job.label}, {sweep.name}")
    legend = {"starting": STARTING, "training": COLOURS[0][1], "repeating steps": AGAIN}
    handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
    axes.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False)
    axes.set(
        yticks=[-lane for lane in range(len(lanes))],
        yticklabels=lanes,
        ylim=(-len(lanes) + 0.5, 1.0),
        xlim=0,
        xlabel="seconds since the start of the sweep",
    )
    title = f"The same sweep, without and with {len(faults)} interruptions"
    axes.set_title(title, loc="left", fontweight="bold")


def _draw_attempt(axes: Any, lane: int, attempt: Attempt, t0: float, colour: str, ink: str) -> None:
    begin, end = attempt.started - t0, attempt.ended - t0
    began = (attempt.began or attempt.ended) - t0
    regained = (attempt.regained or attempt.ended) - t0 if attempt.repeated else began
    edges = [begin, began, regained, end]
    for (left, right), part in zip(
        itertools.pairwise(edges), (STARTING, AGAIN, colour), strict=True
    ):
        axes.barh([lane], [right - left], left=left, height=0.36, color=part)
    label = {"ha": "center", "va": "center", "color": ink, "fontsize": 8}
    axes.text((regained + end) / 2, lane, str(attempt.number), **label)
    if attempt.fault is not None:
        x, mark = attempt.fault.injected - t0, _mark(attempt)
        axes.plot([x], [lane + 0.26], marker="v", markersize=8, color=mark)
        style = {"ha": "center", "va": "bottom", "color": mark, "fontsize": 7}
        axes.text(x, lane + 0.34, attempt.fault.name, **style)


def _mark(attempt: Attempt) -> str:
    assert attempt.fault is not None
    return KILLED if "SIGKILL" in attempt.fault.name else ASKED


def _draw_curves(axes: Any, uninterrupted: Sweep, interrupted: Sweep, faults: list[Fault]) -> None:
    for sweep, width, size, dashes in (
        (uninterrupted, 7.0, 12.0, "solid"),
        (interrupted, 1.5, 4.5, (0, (4, 2))),
    ):
        for job, colours in zip(sweep.jobs, COLOURS, strict=True):
            colour = colours[sweep is interrupted]
            _draw_job(axes, job, f"{job.label}, {sweep.name}", colour, width, size, dashes)
    for job, (_, dark) in zip(interrupted.jobs, COLOURS, strict=True):
        for attempt in job.attempts(faults):
            if attempt.fault is not None:
                axes.axvline(attempt.last_step, color=dark, linewidth=1, linestyle=":", zorder=0)
                top = axes.get_xaxis_transform()
                at = {"transform": top, "clip_on": False, "color": _mark(attempt)}
                axes.plot([attempt.last_step], [1.0], "v", **at)
    axes.set(
        xlabel="step",
        ylabel=f"loss (nats per token)\ntraining: mean over {SMOOTHING_STEPS} steps",
        xlim=(0, uninterrupted.jobs[0].steps * 1.01),
    )
    title = "Training loss, with and without interruptions"
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    held_out = Line2D([], [], linestyle="none", marker="o", color="grey", label="validation loss")
    handles, _ = axes.get_legend_handles_labels()
    axes.legend(handles=[*handles, held_out], framealpha=1.0, edgecolor="white")


def _draw_job(
    axes: Any, job: Job, label: str, colour: str, width: float, size: float, dashes: Any
) -> None:
    metrics = job.metrics()
    losses = [(step + 1, values["loss"]) for step, values in metrics.items()]
    held_out = [(s + 1, v["held_out"]) for s, v in metrics.items() if "held_out" in v]
    line = {"linewidth": width, "linestyle": dashes, "color": colour}
    axes.plot(*_smooth(losses), label=label, **line)
    point = {"linestyle": "none", "marker": "o", "markersize": size, "color": colour}
    axes.plot(*zip(*held_out, strict=True), **point)


def _smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps, and the mean over the `SMOOTHING_STEPS` values around each."""
    steps, values = zip(*points, strict=True)
    half = SMOOTHING_STEPS // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return list(steps), [sum(window) / len(window) for window in windows]
