"""`forge doctor --here`: the health checks of this node, made by hand, as a table."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forge.config import loading
from forge.config.schema import HealthConfig
from forge.errors import ConfigError, ExitCode, RankLost
from forge.health.attempt import devices
from forge.health.by_hand import FAILS, Row, examine
from forge.health.check import Context, Scope
from forge.process import world

_WHAT = """\
makes the health checks of this node, its GPUs and its peers by hand, and prints what each of them
has found; exit code 69 where one fails"""
_MARGIN_S = 30.0
"""Seconds that a rank may take beside its checks."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge doctor", description=_WHAT)
    here = "this node; below srun or torchrun those of all tasks, and between them"
    parser.add_argument("--here", action="store_true", required=True, help=here)
    place = "where checkpoints would go; by default the current directory"
    parser.add_argument("--dir", type=Path, default=Path(), help=place)
    what = "of thresholds, and a site's own: resilience.health.checks.shm.threshold=8"
    parser.add_argument("overrides", nargs="*", metavar="override", help=what)
    return parser


def main(arguments: list[str]) -> int:
    """The command `forge doctor`: make the checks and print the table.

    Returns:
        0 where none fails, 69 where one does, 78 for an override that makes no sense.
    """
    options = _parser().parse_args(arguments)
    try:
        health = loading.from_overrides(options.overrides).health
        here = world.of(os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else it prints C++ stacks of its own
    context = Context(
        config=health.checks.disk,
        checkpoint_dir=options.dir.absolute(),
        job=options.dir.absolute(),
        devices=devices(),
        local_size=here.local_size,
        is_first_of_node=here.local_rank == 0,
    )
    return _alone(health, context) if here.size == 1 else _together(health, context, here)


def _alone(health: HealthConfig, context: Context) -> int:
    return _print(list(examine(health, context, socket.gethostname(), *Scope)), 1)


def _together(health: HealthConfig, context: Context, here: world.World) -> int:
    """Rank 0 prints what all have found, and all end with the same code."""
    from forge.group.meeting import Meeting  # it needs torch

    config = health.checks.collective
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        meeting = Meeting(here, config.timeout_s, is_hosted=is_hosted)
    except RankLost as error:
        sys.stderr.write(f"{error}\n")
        return int(ExitCode.UNHEALTHY)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # as people exclude it
    own = list(examine(health, context, host, Scope.node))
    own += examine(health, context, f"rank {here.rank} on {host}", Scope.task)
    limits = [getattr(health.checks, name).timeout_s for name in vars(health.checks)]
    limit_s = sum(limits) + sum(one.timeout_s for one in health.commands.values()) + _MARGIN_S
    come = meeting.gather("node", [row.as_json() for row in own], limit_s)
    if meeting.missing:
        own = [_unreachable(meeting.missing, here.size, config.timeout_s)] if not here.rank else []
    else:
        meeting.initialise(limit_s)
        own = list(_between(health, context))
    rows = [Row(**one) for found in come.values() for one in found]
    return meeting.answer(lambda: _print(rows + own, here.size), limit_s)


def _between(health: HealthConfig, context: Context) -> Iterator[Row]:
    """What the ranks find of each other; the same on all of them."""
    from forge.group.ranks import Ranks

    ranks = Ranks()
    try:
        yield from examine(health, replace(context, ranks=ranks), "all ranks", Scope.ranks)
    finally:
        ranks.close(_MARGIN_S)


def _unreachable(missing: Sequence[int], size: int, timeout_s: float) -> Row:
    named = ", ".join(map(str, missing[:16]))
    return Row(
        "collective",
        "all ranks",
        FAILS,
        "",
        f"rank {named} of {size} has not come within {timeout_s:g} s",
        "Look whether it has started, and at the network between the nodes.",
    )


def _print(rows: list[Row], size: int) -> int:
    """The table; the exit code."""
    for line in table(_merged(rows) if size > 1 else rows):
        sys.stdout.write(f"{line}\n")
    failed = [row for row in rows if row.verdict == FAILS]
    num_places = len({row.where for row in failed})
    where = f"in {num_places} place{'s' * (num_places > 1)}" if size > 1 else "here"
    what = "1 check fails" if len(failed) == 1 else f"{len(failed)} checks fail"
    sys.stdout.write(f"{what} {where}\n" if failed else "Nothing fails\n")
    sys.stdout.flush()
    return int(ExitCode.UNHEALTHY if failed else ExitCode.FINISHED)


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Of what does not fail, one row for all nodes, or ranks, with the same verdict."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        is_failed = row.verdict == FAILS
        found.setdefault((row.check, row.verdict, row.where if is_failed else ""), []).append(row)
    return [_of_several(several) for several in found.values()]


def _of_several(rows: list[Row]) -> Row:
    first = rows[0]
    if not rows[1:]:
        return first
    where = f"{first.where} and {len(rows) - 1} more"
    return Row(first.check, where, first.verdict, first.threshold, first.found, first.remedy)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines for people: what to do stands below what fails."""
    heads = Row("check", "where", "verdict", "threshold", "found")
    cells = [(r.check, r.where, r.verdict, r.threshold, r.found) for r in (heads, *rows)]
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    indent = " " * sum(width + 2 for width in widths)
    for row, one in zip((heads, *rows), cells, strict=True):
        padded = [f"{cell:{width}}  " for cell, width in zip(one, (*widths, 0), strict=True)]
        yield "".join(padded).rstrip()
        if row.remedy:
            yield f"{indent}{row.remedy}"
