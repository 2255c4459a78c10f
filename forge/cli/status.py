"""`forge status`: the jobs of a sweep, how far they are, and what is wrong with them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from statistics import fmean

from forge.cli import sweep_command
from forge.cli.sweep_command import output, print_lines, width
from forge.errors import NoSweep
from forge.jobdir.job_state import State
from forge.messages import escape
from forge.sweeps import as_json, collect, render, status, words
from forge.sweeps.chosen_metric import Chosen
from forge.sweeps.job import SweepJob
from forge.sweeps.render import Line
from forge.sweeps.status import ORDER
from forge.sweeps.sweep import Sweep

_WHAT = """\
Print the jobs of a sweep: state, progress, rate, time left, metrics, restarts, the newest
checkpoint, and the last problem. The command reads the sweep's directory and changes nothing; it
works while jobs run, after the launcher has ended, and from any machine that has the directory."""
_EXAMPLES = """\
  forge status                                the newest sweep here
  forge status multirun/2026-01-31/12-00-00
  forge status 30410_4                        a job, by its Slurm id
  forge status --metric val_acc:max --sort metric
  forge status --group-by lr
  forge status --csv > results.csv"""
_EVERY_S = 2.0
_SORTS = ("job", "state", "step", "metric")


def _parser() -> argparse.ArgumentParser:
    parser = sweep_command.parser("status", _WHAT, _EXAMPLES)
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help=sweep_command.WHERE)
    parser.add_argument("--failed", action="store_true", help="only jobs that need attention")
    parser.add_argument("--running", action="store_true", help="only jobs that are running")
    most = f"all jobs, even if there are more than {status.MOST}"
    parser.add_argument("--all", action="store_true", help=most)
    parser.add_argument("--sort", choices=_SORTS, default="job", help="the order of the jobs")
    by = "a line for each value of an override, such as lr"
    parser.add_argument("--group-by", metavar="KEY", help=by)
    what = "the metric to show; NAME:max or NAME:min says which value is the best one"
    parser.add_argument("--metric", metavar="NAME", default="", help=what)
    parser.add_argument("--watch", action="store_true", help="look again every two seconds")
    parser.add_argument("--json", action="store_true", help="all fields of the jobs, as JSON")
    what = "overrides, results and metrics of the jobs, as CSV"
    parser.add_argument("--csv", action="store_true", help=what)
    return parser


def main(arguments: list[str]) -> int:
    """The command `forge status`."""
    options = _parser().parse_args(arguments)
    return sweep_command.run(lambda: _watch(options) if options.watch else _once(options))


def _once(options: argparse.Namespace) -> int:
    whole, jobs = sweep_command.read(options.sweep)
    jobs = _ordered(jobs, options)
    if options.json:
        fields = {"path": whole.path, "common": whole.common, "launcher": whole.launcher}
        return output([as_json.dumps({**fields, "missing": whole.missing, "jobs": jobs})])
    if options.csv:
        found = collect.rows(jobs, [options.metric] if options.metric else ())
        return output(collect.as_csv(found).splitlines())
    return output(_drawn(whole, jobs, options, width()))


def _watch(options: argparse.Namespace) -> int:
    """Print the table again and again, until Ctrl+C, all jobs have ended or its pipe closes."""
    if not sys.stdout.isatty():
        while True:
            whole, jobs = sweep_command.read(options.sweep)
            has_reader = print_lines(_drawn(whole, _ordered(jobs, options), options, None))
            if not has_reader or all(job.state.is_final for job in jobs):
                return 0
            time.sleep(_EVERY_S)
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            whole, jobs = sweep_command.read(options.sweep)
            room = console.height - 1
            drawn = _drawn(whole, _ordered(jobs, options), options, console.width)
            if len(drawn) > room:
                drawn = [*drawn[: room - 1], Line(f"… {len(drawn) - room + 1} more lines", "dim")]
            live.update(Group(*(Text(one.text, one.style) for one in drawn)), refresh=True)
            if all(job.state.is_final for job in jobs):
                return 0
            time.sleep(_EVERY_S)


def _drawn(
    whole: Sweep, jobs: Sequence[SweepJob], options: argparse.Namespace, columns: int | None
) -> list[Line]:
    metric = Chosen.parse(options.metric)
    if options.group_by:
        return list(_groups(jobs, options.group_by, metric))
    is_chosen = options.all or options.failed or options.running or len(jobs) < len(whole.jobs)
    return render.lines(status.table(whole, jobs, metric, is_chosen=is_chosen), columns)


def _ordered(jobs: Iterable[SweepJob], options: argparse.Namespace) -> list[SweepJob]:
    """The jobs that the options choose, in their order."""
    found = [
        job
        for job in jobs
        if (not options.failed or job.needs_attention)
        and (not options.running or job.state.is_active)
    ]
    metric = Chosen.parse(options.metric)
    if options.metric and not any(metric.of(job) for job in found) and found:
        known = sorted({name for job in found for name in job.metrics})
        raise NoSweep(
            f"`--metric {options.metric}`: no job has logged this metric; expected one of:"
            f" {', '.join(known) or 'none was logged yet'}"
        )
    if options.sort == "state":
        found.sort(key=lambda job: ORDER.index(job.state))
    elif options.sort == "step":
        found.sort(key=lambda job: -(job.share or 0.0))
    elif options.sort == "metric":
        chosen = metric.of_sweep(found)
        found.sort(key=lambda job: _rank(job, chosen))
    return found


def _rank(job: SweepJob, metric: Chosen) -> float:
    """The place of a job in the order of the best values; jobs without a value come last."""
    best = metric.best(job)
    if best is None or best[0] != best[0]:
        return float("inf")
    return -best[0] if metric.is_higher else best[0]


def _groups(jobs: Iterable[SweepJob], key: str, metric: Chosen) -> Iterable[Line]:
    """A line for each value of an override: its jobs by state, and their metric."""
    groups: dict[str, list[SweepJob]] = {}
    jobs = list(jobs)
    metric = metric.of_sweep(jobs)
    for job in jobs:
        own = [one.lstrip("+~").partition("=") for one in job.overrides]
        value = next((value for name, _, value in own if name == key), "(not set)")
        groups.setdefault(value, []).append(job)
    if set(groups) == {"(not set)"}:
        names = {
            one.lstrip("+~").partition("=")[0]
            for own in groups.values()
            for job in own
            for one in job.overrides
        }
        raise NoSweep(
            f"`--group-by {key}`: no job has this override; expected one of:"
            f" {', '.join(sorted(names)) or 'the sweep has none'}"
        )
    width = max(map(len, groups), default=0)
    for value, members in groups.items():
        by_state = [(state, [job for job in members if job.state is state]) for state in ORDER]
        counts = ", ".join(f"{len(some)} {state.value}" for state, some in by_state if some)
        best = [one[0] for one in map(metric.best, members) if one is not None]
        text = ""
        if best:
            first = max(best) if metric.is_higher else min(best)
            shown = words.number(first), words.number(fmean(best))
            text = f"  {escape(metric.name)}: best {shown[0]}, mean of the best {shown[1]}"
        is_bad = any(job.needs_attention for job in members)
        style = "yellow" if is_bad else "green" if _all_finished(members) else ""
        yield Line(f"{escape(key)}={escape(value):{width}}  {counts}{text}", style)


def _all_finished(jobs: Iterable[SweepJob]) -> bool:
    return all(job.state is State.finished for job in jobs)
