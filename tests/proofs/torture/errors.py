"""Every call of every scenario fails once, or does half of what it was asked."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

from torture import children, scenario
from torture.calls import CHANGES, LOOKS, READS, WRITES, Call, Interception
from torture.children import Counts, Plan
from torture.scenario import Op, World

from forge.errors import CheckpointError

CALLS = (*CHANGES, *READS, *LOOKS, "open", "close")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EINTR)
_SPACE = (errno.ENOSPC, errno.EDQUOT)
_RETRIED_BY_PYTHON = (*WRITES, *READS, "open", "create", "fsync", "fdatasync", "fstat", "lockf")
HALF = -1
"""Stands among the errors for a short read or write."""


def _is_possible(call: Call, error: int) -> bool:
    if error == HALF:
        return call.is_halvable
    if error in _SPACE:  # a file system that allocates late may say so at any of these
        return call.name in (*CHANGES, "close") and call.name not in ("lockf", "fcntl")
    return error != errno.EINTR or call.name not in _RETRIED_BY_PYTHON


class _Faults:
    """Hook of an Interception: the call `number` fails; `calls` are all that could have.

    Or the next one that can fail so: with threads another call may have that number this time.
    """

    def __init__(self, number: int, error: int) -> None:
        self.number, self.error = number, error
        self.calls: list[Call] = []
        self.has_hit = False

    def __call__(self, call: Call) -> Any:
        self.calls.append(call)
        is_meant = 0 <= self.number <= call.number and _is_possible(call, self.error)
        if self.has_hit or not is_meant:
            return call.make()
        self.has_hit = True
        if self.error == HALF:
            return call.make_half()
        if call.name == "close":
            call.make()  # the descriptor is gone all the same
        raise OSError(self.error, os.strerror(self.error), call.path)


def _allowed_failure(op: Op | None) -> tuple[type[Exception], ...]:
    return (CheckpointError,) if op in (None, ("open",)) else (OSError, CheckpointError)


def _run(directory: Path, ops: list[Op], worlds: list[World], faults: _Faults) -> int:
    """The scenario with one failure; returns how many operations failed."""
    failed = 0
    with Interception(directory.parent, faults, CALLS):
        for index in range(-1, len(ops)):
            op = ops[index] if index >= 0 else None
            for is_last_try in (False, True):
                try:
                    if op is None:
                        actor = scenario.Actor(directory)
                    else:
                        actor.do(op)
                    if op == ("read",):  # a disk that fails may cost the newest, not more
                        newest = max(worlds[index])
                        cost = newest - (actor.read_step or 0)
                        assert 0 <= cost <= (faults.error != HALF), f"{newest} was not read"
                    break
                except _allowed_failure(op):
                    failed += 1
                    assert faults.has_hit, "it failed by itself"
                    assert not is_last_try, "it failed again"
                    if op is not None:
                        check_there(directory, worlds[index], worlds[index + 1])
                    if op == ("open",):
                        op = None
    actor.store.retain()  # what could not be removed at the time
    actor.store.wait()
    aside = list(directory.glob(".work_*/*_step_*"))
    assert not aside, f"taken away and never deleted: {aside}"
    world = scenario.world_of(actor.store)
    # One that could not be read once takes no other's place: more may be kept.
    assert worlds[-1].items() <= world.items(), f"at the end there is {world}, not {worlds[-1]}"
    assert len(world) == len(worlds[-1]) or any("read" in op or "damage" in op for op in ops)
    actor.store.close()
    scenario.check(directory, {step: {tag} for step, tag in world.items()})
    return failed


def check_there(directory: Path, before: World, after: World) -> None:
    """Nothing good is lost while the store is open still."""
    for step, tags in scenario.allowed_between(before, after).items():
        path = directory / f"step_{step}"
        if scenario.ABSENT not in tags:
            assert path.exists(), f"{path.name} is lost by a failure"
    hidden = [name for name in os.listdir(directory) if "tmp" in name]
    assert not hidden, f"left behind: {hidden}"


def _points(directory: Path, ops: list[Op], worlds: list[World]) -> list[tuple[int, int, str]]:
    """(number, error, name) of every failure that can be."""
    none = _Faults(-2, 0)
    _run(directory, ops, worlds, none)
    shutil.rmtree(directory)
    return [
        (number, error, str(call))
        for number, call in enumerate(none.calls)
        for error in (*ERRORS, HALF)
        if _is_possible(call, error)
    ]


def _all(directory: Path, ops: list[Op], worlds: list[World], plan: Plan, name: str) -> Counts:
    counts = Counts()
    rng = random.Random(f"{plan.seed} {name}")
    points = _points(directory, ops, worlds)
    plan.break_forge()
    counts.add(points=len(points))
    for number, error, what in points:
        if plan.skips(rng, counts):
            continue
        faults = _Faults(number, error)
        try:
            failed = _run(directory, ops, worlds, faults)
            problem = ""
        except Exception as raised:  # noqa: BLE001 - told as a failure
            failed, problem = 1, children.traceback.format_exc() + repr(raised)
            children.let_go()
        is_hit = faults.has_hit
        counts.hit(name, is_hit)
        counts.add(failures_made=is_hit, survived=is_hit and not problem, operations_failed=failed)
        if problem:
            kind = errno.errorcode.get(error, "half")
            counts.failures.append(f"{name}: call {number} ({what}), {kind}: {problem}")
        shutil.rmtree(directory, ignore_errors=True)
    return counts


@scenario.small_chunks()
def run(plan: Plan) -> Counts:
    """Fail at each call, with each error."""
    counts = Counts()
    directory = plan.root / "checkpoints"
    for name, ops in scenario.SCENARIOS.items():
        worlds = scenario.worlds(name, directory)
        counts.take(children.in_child(_all, directory, ops, worlds, plan, name, timeout_s=3600.0))
        counts.add(scenarios=1)
    counts.check_hits()
    return counts
