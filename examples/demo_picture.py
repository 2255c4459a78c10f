"""The demo's picture: a timeline of attempts above the loss curves of both runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from demo_job import Attempt, Job
from matplotlib.patches import Patch

from forge import ledger

matplotlib.use("Agg")

# Light and broad is the undisturbed run, dark and narrow the disturbed one, on top of it.
LIGHT = {"training": "#9ecae1", "held out": "#b7e0a8"}
DARK = {"training": "#08519c", "held out": "#1b7837"}
AGAIN, STARTING = "#fd8d3c", "#d4d4d4"
ASKED, KILLED = "#7b3294", "#cb181d"
SMOOTHING_STEPS = 21


def draw(undisturbed: Job, disturbed: Job, path: Path) -> Path:
    """Write the picture."""
    figure, (timeline, curves) = plt.subplots(
        2, 1, figsize=(11, 8), height_ratios=[4, 7], layout="constrained"
    )
    _draw_timeline(timeline, undisturbed, disturbed)
    _draw_curves(curves, undisturbed, disturbed)
    for axes in (timeline, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _draw_timeline(axes: Any, undisturbed: Job, disturbed: Job) -> None:
    t0 = min(job.attempts[0].started for job in (undisturbed, disturbed))
    for attempt in undisturbed.attempts:
        _draw_attempt(axes, 1, attempt, t0, LIGHT["training"], "black")
    for attempt in disturbed.attempts:
        _draw_attempt(axes, 0, attempt, t0, DARK["training"], "white")
    legend = {
        "starting": STARTING,
        "training, undisturbed": LIGHT["training"],
        "training, disturbed": DARK["training"],
        "repeating steps": AGAIN,
    }
    handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
    axes.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False)
    axes.set(
        yticks=[1, 0],
        yticklabels=["undisturbed", "disturbed"],
        ylim=(-0.4, 1.8),
        xlim=0,
        xlabel="seconds since both started",
    )
    title = f"The same training, undisturbed and interrupted {len(disturbed.attempts) - 1} times"
    axes.set_title(title, loc="left", fontweight="bold")


def _draw_attempt(
    axes: Any, lane: int, attempt: Attempt, t0: float, colour: str, text_colour: str
) -> None:
    begin, end = attempt.started - t0, attempt.ended - t0
    began = attempt.began - t0
    regained = (attempt.regained or attempt.ended) - t0 if attempt.repeated else began
    edges = [begin, began, regained, end]
    for (left, right), part in zip(
        itertools.pairwise(edges), (STARTING, AGAIN, colour), strict=True
    ):
        axes.barh([lane], [right - left], left=left, height=0.36, color=part)
    label = {"ha": "center", "va": "center", "color": text_colour, "fontsize": 8}
    axes.text((regained + end) / 2, lane, f"attempt {attempt.number}", **label)
    if attempt.blow is not None:
        x, mark = attempt.struck - t0, _mark(attempt)
        text = f"{attempt.blow.name}\n+ damage" if attempt.damaged else attempt.blow.name
        axes.plot([x], [lane + 0.26], marker="v", markersize=9, color=mark)
        axes.text(x, lane + 0.36, text, ha="center", va="bottom", color=mark, fontsize=9)


def _mark(attempt: Attempt) -> str:
    assert attempt.blow is not None
    return KILLED if attempt.blow.name == "SIGKILL" else ASKED


def _draw_curves(axes: Any, undisturbed: Job, disturbed: Job) -> None:
    for job, colours, width, size, dashes in (
        (undisturbed, LIGHT, 7.0, 12.0, "solid"),
        (disturbed, DARK, 1.5, 4.5, (0, (4, 2))),
    ):
        metrics = ledger.read(job.directory).metrics
        losses = [(step + 1, values["loss"]) for step, values in metrics.items()]
        held_out = [(s + 1, v["held_out"]) for s, v in metrics.items() if "held_out" in v]
        line = {"linewidth": width, "linestyle": dashes, "color": colours["training"]}
        axes.plot(*_smooth(losses), label=f"training, {job.name}", **line)
        point = {
            "linestyle": "none",
            "marker": "o",
            "markersize": size,
            "color": colours["held out"],
        }
        axes.plot(*zip(*held_out, strict=True), label=f"held out, {job.name}", **point)
    for attempt in disturbed.attempts:
        if attempt.blow is not None:
            mark = _mark(attempt)
            axes.axvline(attempt.last_step, color=mark, linewidth=1, linestyle=":", zorder=0)
            top = axes.get_xaxis_transform()
            axes.plot([attempt.last_step], [1.0], "v", transform=top, clip_on=False, color=mark)
    axes.set(
        xlabel="step",
        ylabel=f"loss in nats per token\n(training: mean over {SMOOTHING_STEPS} steps)",
        xlim=(0, undisturbed.steps * 1.01),
    )
    title = "The losses that both logged, on top of each other"
    axes.set_title(title, loc="left", fontweight="bold", pad=12)
    axes.legend(ncols=2, framealpha=1.0, edgecolor="white")


def _smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps, and the mean over the `SMOOTHING_STEPS` values around each."""
    steps, values = zip(*points, strict=True)
    half = SMOOTHING_STEPS // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return list(steps), [sum(window) / len(window) for window in windows]
