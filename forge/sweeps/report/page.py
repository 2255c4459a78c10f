"""The HTML of the report: one file, with plotly's JavaScript in it, that needs no network."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from forge._version import __version__
from forge.sweeps import status, times, words
from forge.sweeps.job import SweepJob
from forge.sweeps.report import by_result, by_use, over_time
from forge.sweeps.report.data import Report
from forge.sweeps.times import Part

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1280px; padding: 1.5rem;
  color: #1b1f23; background: #fff }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.2rem 0 0 }
p { margin: .2rem 0 .6rem; color: #57606a } code { background: #f3f4f6; padding: .1em .3em }
nav a { margin-right: 1rem } .facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 }
.facts div { border: 1px solid #d8dee4; border-radius: 6px; padding: .4rem .8rem }
.facts b { display: block; font-size: 1.2rem; color: #1b1f23 } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .87rem; width: 100% }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #eaeef2;
  vertical-align: top } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.failed td:nth-child(3), .lost td:nth-child(3) { color: #b42318 }
.finished td:nth-child(3) { color: #1a7f37 }
.stopped td:nth-child(3), .terminated td:nth-child(3) { color: #9a6700 }
@media (max-width: 640px) { body { padding: .8rem } }
"""
_LAYOUT = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 50, "b": 45},
    "font": {"size": 12},
    "hoverlabel": {"align": "left"},
    "showlegend": True,
}
_LEGEND_ON_TOP = {"legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}}
"""For figures without a menu: the legend is where the menu would be."""


class Figure(NamedTuple):
    """A figure with its place in the report."""

    anchor: str
    title: str
    text: str
    """A sentence that explains it."""
    draw: Callable[[Report], go.Figure | None]


_FIGURES = (
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


def lines(report: Report) -> Iterator[str]:
    """The page, part by part."""
    title = html.escape(f"{report.sweep.path.name}: forge report")
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
    yield f"<h1>{html.escape(str(report.sweep.path))}</h1>"
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.made))
    common = html.escape(" ".join(report.sweep.common))
    yield f"<p>forge {__version__}, {made}{f': <code>{common}</code>' if common else ''}</p>"
    if report.sweep.snapshot:
        copy = html.escape(report.sweep.snapshot)
        yield f"<p>The jobs run from a copy of the code: <code>{copy}</code></p>"
    yield from _facts(report)
    drawn = [(one, one.draw(report)) for one in _FIGURES]
    links = [f'<a href="#{one.anchor}">{one.title}</a>' for one, figure in drawn if figure]
    yield f'<nav>{"".join(links)}<a href="#jobs">Jobs</a></nav>'
    for one, figure in drawn:
        if figure is None:
            continue
        figure.update_layout(_LAYOUT | ({} if figure.layout.updatemenus else _LEGEND_ON_TOP))
        yield f'<h2 id="{one.anchor}">{one.title}</h2><p>{one.text}</p>'
        yield figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=f"figure-{one.anchor}",
            config={"displaylogo": False, "responsive": True},
        )
    yield from _table(report)
    yield from _problems(report)
    yield "</body></html>"


def _facts(report: Report) -> Iterator[str]:
    sums = dict.fromkeys(Part, 0.0)
    for job in report.jobs:
        sums = {part: sums[part] + job.sums[part] for part in Part}
    good = times.goodput(sums)
    restarts = sum(max(len(job.attempts) - 1, 0) for job in report.jobs)
    steps = sum(one[1] for job in report.jobs for one in job.lost)
    counts = report.sweep.counts()
    facts = [
        *((f"{counts[state]}", state.value) for state in reversed(status.ORDER) if counts[state]),
        (_hours(sum(sums.values())), "of all jobs together"),
        ("" if good is None else f"{good:.1%}", "productive, of the time with processes"),
        (str(restarts), "restarts"),
        (str(steps), "steps repeated after kills"),
    ]
    boxes = "".join(f"<div><b>{value}</b>{what}</div>" for value, what in facts if value)
    yield f'<div class="facts">{boxes}</div>'


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _table(report: Report) -> Iterator[str]:
    name = html.escape(report.chosen.name)
    heads = ["job", "overrides", "state", "step", "attempts", name, f"best {name}", "why"]
    numeric = {0, 3, 4, 5, 6}
    yield '<h2 id="jobs">Jobs</h2><div class="scroll"><table><tr>'
    yield "".join(
        f"<th{' class=n' if n in numeric else ''}>{head}</th>" for n, head in enumerate(heads)
    )
    for one in report.jobs:
        job = one.job
        found, best = report.chosen.of(job), report.chosen.best(job)
        cells = [
            str(job.number),
            html.escape(job.label),
            job.state.value,
            "" if job.step is None else f"{job.step}{f'/{job.steps}' if job.steps else ''}",
            html.escape(_attempts(job)),
            "" if found is None else words.number(found.last),
            "" if best is None else words.number(best[0]),
            html.escape(status.problem_of(job)),
        ]
        row = "".join(
            f"<td{' class=n' if n in numeric else ''}>{cell}</td>" for n, cell in enumerate(cells)
        )
        yield f'</tr><tr class="{job.state.value}">{row}'
    yield "</tr></table></div>"


def _attempts(job: SweepJob) -> str:
    """How many there were, and why they ended, unless a single one says no more than the state."""
    return f"{job.attempts}: {words.reasons(job.ends)}" if job.attempts > 1 else str(job.attempts)


def _problems(report: Report) -> Iterator[str]:
    if report.problems:
        yield '<h2 id="missing">What could not be read</h2><ul>'
        yield from (f"<li>{html.escape(one)}</li>" for one in report.problems)
        yield "</ul>"
