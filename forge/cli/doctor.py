"""`forge doctor`: runs the health checks of this node by hand.

Without options it prints the checks with a finding, and the remedies; `-v` prints a table of all
checks. In the tasks of a Slurm step, or under torchrun, rank 0 prints the findings of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from forge import messages
from forge.config import loading
from forge.config.schema import HealthConfig
from forge.errors import ConfigError, DiskFull, ExitCode, RankLost, SlurmRefused
from forge.health import attempt
from forge.health.check import TIMEOUT_S, Answer, Context, Finding, Scope, make
from forge.process import world
from forge.slurm import client, cluster_facts

_WHAT = """\
Check this node: the disk, /dev/shm and the GPUs, and, under srun or torchrun, the communication
between all tasks. Checks that fail are printed first, with what to do; -v prints all of them. On a
cluster, also print what a preemption, a time limit and a lost node will do to a job, and the config
that helps. Exit code: 0 if no check fails, 69 if one does."""
_MARGIN_S = 30.0
"""Seconds that a rank can need in addition to its checks."""
_WIDTH = 80
"""Columns, if the output is not a terminal."""
OK, WARNS, FAILS, NOT_HERE, NOT_MADE = "ok", "warns", "FAILS", "not here", "no result"
_ORDER = (FAILS, WARNS, NOT_MADE, OK, NOT_HERE)


class Row(NamedTuple):
    """One line of the table."""

    check: str
    where: str
    """The node, or the rank."""
    verdict: str
    found: str = ""
    remedy: str = ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge doctor",
        description=_WHAT,
        epilog="Examples: forge doctor; srun forge doctor -v --dir outputs/2026-01-31/12-00-00",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print all checks as a table")
    where = "the checkpoint directory, to check its disk (default: the current directory)"
    parser.add_argument("--dir", type=Path, default=Path(), help=where)
    what = (
        "a key of the policy: resilience.health.checks.shm=ignore skips a check,"
        " resilience.health.commands.nhc.run=[nhc,-a] adds a command of your own"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=what)
    return parser


def main(arguments: list[str]) -> int:
    """The command `forge doctor`: run the checks and print their findings.

    Returns:
        0 if no check fails, 69 if one does, 78 if an override is wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        health = loading.from_overrides(options.overrides).health
        here = world.of(os.environ)
    except ConfigError as error:
        sys.stderr.write(messages.escape(f"forge: {error}\n", "\n"))
        return int(error.exit_code)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else torch prints C++ stacks
    context = attempt.here(health, options.dir.absolute(), options.dir.absolute())
    if here.size == 1:
        rows = _examined(health, context, socket.gethostname(), *Scope)
        code = _print(rows, is_verbose=options.verbose)
        _print_cluster()
        return code
    return _together(health, context, here, is_verbose=options.verbose)


def _examined(config: HealthConfig, context: Context, where: str, *scopes: Scope) -> Iterator[Row]:
    """Run the checks of these scopes, without the policy's actions; a row for each."""
    for check, _ in attempt.asked_for(config, context, *scopes):
        try:
            answer = make(check, context)
        except DiskFull as error:
            answer = Answer(Finding(str(error), is_failed=True, remedy="Free some disk space."))
        finding = answer.finding
        if finding is None:
            verdict = NOT_MADE if answer.error else NOT_HERE
            finding = Finding(answer.error)
        else:
            failed = WARNS if finding.only_warns else FAILS
            verdict = failed if finding.is_failed else OK
        remedy = finding.remedy if finding.is_failed else ""
        yield Row(check.name, where, verdict, finding.value, remedy)


def _together(
    health: HealthConfig, context: Context, here: world.RankInfo, *, is_verbose: bool
) -> int:
    """All-gather the rows, so that all ranks exit with the same code; rank 0 prints the rows."""
    from forge.group.rendezvous import meet  # it needs torch

    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # the name for `--exclude`
    of_all = attempt.asked_for(health, replace(context, is_first_of_node=True))
    limit_s = sum(check.timeout_s for check, _ in of_all) + _MARGIN_S
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    lost = ""
    try:
        meet(here, TIMEOUT_S, limit_s, is_hosted=is_hosted)
    except RankLost as error:
        lost = str(error)
    rows = list(_examined(health, context, host, Scope.node))
    rows += _examined(health, context, f"rank {here.rank} on {host}", Scope.task)
    if not lost:
        try:
            of_ranks = _of_all(rows, health, context, limit_s)
            return _print(of_ranks, is_verbose=is_verbose, is_shown=here.rank == 0)
        except RankLost as error:
            lost = str(error)
    what = "Check whether that rank has started, and check the network between the nodes."
    return _print([*rows, Row("ranks", "all ranks", FAILS, lost, what)], is_verbose=is_verbose)


def _of_all(
    rows: list[Row], health: HealthConfig, context: Context, limit_s: float
) -> Iterator[Row]:
    """The rows of each rank, and those of the checks of all ranks; the same on each rank."""
    from forge.group.ranks import StoreCoordinator

    ranks = StoreCoordinator()
    try:
        for text in ranks.gather("the rows", json.dumps(rows).encode(), limit_s):
            yield from (Row(*row) for row in json.loads(text))
        yield from _examined(health, replace(context, ranks=ranks), "all ranks", Scope.ranks)
    finally:
        ranks.close(_MARGIN_S)


def _print(found: Iterable[Row], *, is_verbose: bool, is_shown: bool = True) -> int:
    """Print the report; returns the exit code."""
    rows = sorted(merged(found), key=lambda row: _ORDER.index(row.verdict))
    is_failed = any(row.verdict == FAILS for row in rows)
    if is_shown:
        width = shutil.get_terminal_size((_WIDTH, 0)).columns
        shown = rows if is_verbose else [row for row in rows if row.verdict not in (OK, NOT_HERE)]
        for line in table(shown, width) if shown else ():
            sys.stdout.write(f"{line}\n")
        for line in textwrap.wrap(_summary(rows, is_verbose=is_verbose), width):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return int(ExitCode.UNHEALTHY if is_failed else ExitCode.FINISHED)


def _summary(rows: Sequence[Row], *, is_verbose: bool) -> str:
    """How many checks fail, which ones pass, and which ones do not apply."""
    worst = {row.check: row.verdict for row in reversed(rows)}  # rows begin with the worst
    failed, warned, unmade, passed, absent = (
        [check for check in reversed(worst) if worst[check] == verdict] for verdict in _ORDER
    )
    parts = []
    if failed:
        parts.append("1 check fails" if len(failed) == 1 else f"{len(failed)} checks fail")
    else:
        parts.append("No check fails")
    parts += [f"{len(warned)} warned"] if warned else []
    parts += [f"{len(unmade)} gave no result"] if unmade else []
    text = f"{', '.join(parts)}."
    if is_verbose:
        return text
    text += f" Passed: {', '.join(passed) or 'none'}."
    text += f" Not applicable here: {', '.join(absent)}." if absent else ""
    return f"{text} `forge doctor -v` shows all."


def _print_cluster() -> None:
    """Print the effects of the cluster's configuration; nothing on a machine without Slurm."""
    if not client.can_submit():
        return
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    try:
        found = [*cluster_facts.facts(client.settings(), client.partitions())]
    except SlurmRefused as error:
        said = " ".join(str(error).split())  # scontrol prints several lines
        text = f"Slurm does not answer, so its configuration is unknown: {said}"
        sys.stdout.write("\n" + textwrap.fill(messages.escape(text), width) + "\n")
        return
    sys.stdout.write("\nEffects of this cluster's configuration on a job:\n")
    for fact in found:
        text = messages.escape(f"{fact.topic}: {fact.text}")
        lines = textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
        remedy = f"→ {messages.escape(fact.remedy)}" if fact.remedy else ""
        lines += [f"  {line}" for line in textwrap.wrap(remedy, width - 2)]
        sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def merged(rows: Iterable[Row]) -> list[Row]:
    """Rows without a remedy become one row for all nodes, or ranks, with the same verdict."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        where = row.where if row.remedy else ""
        groups.setdefault((row.check, row.verdict, where), []).append(row)
    return [
        first._replace(where=f"{first.where} and {len(rest)} more") if rest else first
        for first, *rest in groups.values()
    ]


def table(rows: Sequence[Row], width: int = _WIDTH) -> Iterator[str]:
    """The lines of the table; the remedy follows each failed check."""
    lines = [Row("check", "where", "verdict"), *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(3)]
    indent = sum(widths) + 6
    rest = max(width - indent, 20)
    for row in lines:
        cells = [f"{cell:{cell_width}}" for cell, cell_width in zip(row, widths, strict=False)]
        found = row.found if row is not lines[0] else "found"
        first, *below = textwrap.wrap(messages.escape(found), rest) or [""]
        yield "  ".join([*cells, first]).rstrip()
        for line in [*below, *textwrap.wrap(messages.escape(row.remedy), rest)]:
            yield f"{' ' * indent}{line}"
