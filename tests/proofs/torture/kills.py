"""SIGKILL before, after and in the middle of every call of every scenario."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from torture import children, scenario
from torture.calls import CHANGES, WRITES, Call, Interception
from torture.children import Checker, Child, Counts, Plan, Shared

WHEN = ("before", "halfway", "after")
Break = Callable[[], None]


def _count(directory: Path, ops: list[scenario.Op], break_forge: Break) -> list[str]:
    """The names of the calls of an undisturbed run."""
    break_forge()
    seen = []

    def note(call: Call) -> object:
        seen.append(call.name)
        return call.make()

    with Interception(directory, note, CHANGES):
        actor = scenario.Actor(directory)
        for _ in actor.run(ops):
            pass
    actor.store.close()
    shutil.rmtree(directory)
    return seen


def _run_to_death(
    directory: Path,
    ops: list[scenario.Op],
    number: int,
    when: str,
    done: Shared,
    is_waiting: bool,
) -> None:
    def deadly(call: Call) -> object:
        if call.number != number:
            return call.make()
        if when == "after":
            with contextlib.suppress(OSError):  # there is not always a link to unlink
                call.make()
        if when == "halfway" and call.is_halvable:
            call.make_half()
        children.die()
        return None

    with Interception(directory, deadly, CHANGES):
        for count in scenario.Actor(directory, is_waiting=is_waiting).run(ops):
            done[0] = count + 1  # 0: not even the store was open


@scenario.small_chunks()
def run(plan: Plan) -> Counts:
    """Kill at each point, with what is removed being deleted beside or not."""
    counts = Counts()
    rng = random.Random(plan.seed)
    checker = Checker(scenario.check, plan)
    for name, ops in scenario.SCENARIOS.items():
        directory = plan.root / "checkpoints"
        worlds = scenario.worlds(name, directory)
        calls = children.in_child(_count, directory, ops, plan.break_forge)
        points = [
            (number, when)
            for number, call in enumerate(calls)
            for when in WHEN
            if when != "halfway" or call in WRITES
        ]
        counts.add(scenarios=1, calls=len(calls), points=len(points))
        for number, when in points:
            if plan.skips(rng, counts):
                continue
            for is_waiting in (rng.random() < 0.5, True):
                point = (number, when, is_waiting)
                is_hit, problem = _one(directory, ops, worlds, point, plan.break_forge, checker)
                counts.add(killed=is_hit, survived=is_hit and not problem)
                if problem:
                    counts.failures.append(f"{name}: kill {when} call {number}: {problem}")
                shutil.rmtree(directory, ignore_errors=True)
                if is_hit or problem:
                    break
            counts.hit(name, is_hit)
    counts.check_hits()
    checker.close()
    return counts


def _one(
    directory: Path,
    ops: list[scenario.Op],
    worlds: list[scenario.World],
    point: tuple[int, str, bool],
    break_forge: Break,
    checker: Checker,
) -> tuple[bool, str]:
    """Whether it was killed, and what is wrong then."""
    number, when, is_waiting = point

    def disturbed() -> None:
        break_forge()
        _run_to_death(directory, ops, number, when, done, is_waiting)

    done = Shared()
    kind, value = Child(disturbed).result()
    if kind == "returned":  # with threads a run may have fewer calls than another
        return False, ""
    if kind != "killed":
        return False, f"the child {kind}: {value}"
    before = max(0, done[0] - 1)
    allowed = scenario.allowed_between(worlds[before], worlds[min(before + 1, len(ops))])
    problem = checker.problem(directory, allowed)
    return True, problem and f"during {ops[before : before + 1]}: {problem}"
