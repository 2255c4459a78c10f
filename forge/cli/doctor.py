"""`forge doctor --here`: the health checks of this node, made by hand, as a table."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from forge import messages
from forge.config import loading
from forge.config.schema import HealthConfig
from forge.errors import ConfigError, DiskFull, ExitCode, RankLost
from forge.health import attempt
from forge.health.check import TIMEOUT_S, Answer, Context, Finding, Scope, make
from forge.process import world

_WHAT = """\
makes the health checks of this node, its GPUs and its peers by hand, and prints what each of them
has found; exit code 69 if one fails"""
_MARGIN_S = 30.0
"""Seconds that a rank may take beside its checks."""
OK, WARNS, FAILS, NOT_HERE, NOT_MADE = "ok", "warns", "FAILS", "not here", "not made"


class Row(NamedTuple):
    """One line of the table."""

    check: str
    where: str
    """The node, or the rank."""
    verdict: str
    found: str = ""
    remedy: str = ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge doctor", description=_WHAT)
    here = "this node; below srun or torchrun those of all tasks, and between them"
    parser.add_argument("--here", action="store_true", required=True, help=here)
    place = "where checkpoints would go; by default the current directory"
    parser.add_argument("--dir", type=Path, default=Path(), help=place)
    what = "of a site's own checks, and of those to leave out: resilience.health.checks.shm=ignore"
    parser.add_argument("overrides", nargs="*", metavar="override", help=what)
    return parser


def main(arguments: list[str]) -> int:
    """The command `forge doctor`: make the checks and print the table.

    Returns:
        0 if none fails, 69 if one does, 78 for an override that makes no sense.
    """
    options = _parser().parse_args(arguments)
    try:
        health = loading.from_overrides(options.overrides).health
        here = world.of(os.environ)
    except ConfigError as error:
        sys.stderr.write(messages.escape(f"{error}\n", "\n"))
        return int(error.exit_code)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else it prints C++ stacks of its own
    context = attempt.here(health, options.dir.absolute(), options.dir.absolute())
    if here.size == 1:
        return _print(_examined(health, context, socket.gethostname(), *Scope))
    return _together(health, context, here)


def _examined(config: HealthConfig, context: Context, where: str, *scopes: Scope) -> Iterator[Row]:
    """Make the checks of these scopes, whatever the policy would do; a row for each."""
    for check, action in attempt.asked_for(config, context, *scopes):
        try:
            answer = make(check, replace(context, action=action))
        except DiskFull as error:
            answer = Answer(Finding(str(error), is_failed=True, remedy="Make room."))
        found = answer.finding
        if found is None:
            verdict = NOT_MADE if answer.error else NOT_HERE
            found = Finding(answer.error)
        else:
            verdict = (WARNS if found.only_warns else FAILS) if found.is_failed else OK
        remedy = found.remedy if found.is_failed else ""
        yield Row(check.name, where, verdict, found.value, remedy)


def _together(health: HealthConfig, context: Context, here: world.World) -> int:
    """All ranks know what all have found, and end with the same code; rank 0 prints it."""
    from forge.group.meeting import meet  # it needs torch

    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # as people exclude it
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
            return _print(_of_all(rows, health, context, limit_s), is_shown=here.rank == 0)
        except RankLost as error:
            lost = str(error)
    what = "Look whether it has started, and at the network between the nodes."
    return _print([*rows, Row("ranks", "all ranks", FAILS, lost, what)])


def _of_all(
    rows: list[Row], health: HealthConfig, context: Context, limit_s: float
) -> Iterator[Row]:
    """What each rank has found, and all of them together; the same on each."""
    from forge.group.ranks import Ranks

    ranks = Ranks()
    try:
        for text in ranks.gather("the rows", json.dumps(rows).encode(), limit_s):
            yield from (Row(*row) for row in json.loads(text))
        yield from _examined(health, replace(context, ranks=ranks), "all ranks", Scope.ranks)
    finally:
        ranks.close(_MARGIN_S)


def _print(found: Iterable[Row], *, is_shown: bool = True) -> int:
    """The table; the exit code."""
    rows = list(found)
    failed = [row for row in rows if row.verdict == FAILS]
    if is_shown:
        what = "1 check fails" if len(failed) == 1 else f"{len(failed)} checks fail"
        for line in (*table(_merged(rows)), what if failed else "Nothing fails"):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return int(ExitCode.UNHEALTHY if failed else ExitCode.FINISHED)


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Of what needs no remedy, one row for all nodes, or ranks, with the same verdict."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        where = row.where if row.remedy else ""
        found.setdefault((row.check, row.verdict, where), []).append(row)
    return [
        first._replace(where=f"{first.where} and {len(rest)} more") if rest else first
        for first, *rest in found.values()
    ]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines for people: what to do stands below what fails."""
    lines = [Row("check", "where", "verdict"), *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(3)]
    for row in lines:
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
        found = row.found if row is not lines[0] else "found"
        yield "  ".join([*cells, found]).rstrip()
        if row.remedy:
            yield f"{' ' * sum(width + 2 for width in widths)}{row.remedy}"
