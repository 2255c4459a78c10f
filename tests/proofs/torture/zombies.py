"""An older attempt that sleeps at any of its calls, and wakes up when a newer one is at any of its.

The older one stops itself before its call n. The newer one then runs, to its end or up to its call
m, where it stops in turn until the older one has ended. Chance decides whether the file system has
given the lock of the older one away, and whether both, on two hosts, have the same pid.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from torture import children, scenario
from torture.calls import CHANGES, Call, Interception
from torture.children import Checker, Child, Counts, Plan
from torture.kills import Break
from torture.scenario import ABSENT, Actor, Allowed, Op

from forge.errors import CheckpointError, DirectoryInUse

OLDER: list[Op] = [
    ("commit", 3, "z"),
    ("retain",),
    ("commit", 4, "z"),
    ("commit", 4, "y"),
    ("retain",),
    ("discard", 3),
    ("commit", 4, "x"),
    ("retain",),
]
WAKES_PER_SLEEP = 6
"""Calls of the newer attempt at which the older one wakes up, of each call where it sleeps."""


def _as_attempt(number: int, has_lock: bool, has_pid: bool) -> None:
    os.environ["SLURM_JOB_ID"], os.environ["SLURM_RESTART_COUNT"] = "77", str(number)
    if not has_lock:
        fcntl.lockf = fcntl.flock = lambda *args: None
    if not has_pid:
        os.getpid = lambda: 7


def _sleeping_at(number: int, counted: list[str]) -> Any:
    def hook(call: Call) -> Any:
        counted.append(call.name)
        if call.number == number:  # this thread, which else might go on for an instant
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return call.make()

    return hook


def _prepare(directory: Path) -> None:
    _as_attempt(0, True, True)
    actor = Actor(directory)
    for _ in actor.run([("commit", 1, "a"), ("commit", 2, "a")]):
        pass
    actor.store.close()


def _older(directory: Path, sleeps_at: int, *facts: bool) -> list[str]:
    """What it calls; it ends when its work is done or when it is refused."""
    hook = _sleeping_at(sleeps_at, counted := [])
    _as_attempt(1, *facts)
    with Interception(directory, hook, CHANGES), contextlib.suppress(DirectoryInUse):
        actor = None
        try:
            actor = Actor(directory)
            for _ in actor.run(OLDER):
                pass
        except (OSError, CheckpointError):
            if actor is not None:  # as a save that failed: it is tried again
                with contextlib.suppress(OSError):
                    actor.do(("commit", 5, "z"))
                actor.do(("commit", 6, "z"))
                raise AssertionError("the older attempt may still commit") from None
    return counted


def _newer(directory: Path, sleeps_at: int, has_lock: bool, has_pid: bool) -> Any:
    """What it calls, and the steps that it committed last."""
    hook = _sleeping_at(sleeps_at, counted := [])
    _as_attempt(2, True, has_pid)
    with Interception(directory, hook, CHANGES):
        actor = Actor(directory)
        found = actor.store.newest()
        assert found is not None
        step = found.manifest.step
        for more in (1, 2, 3):
            actor.do(("commit", step + more, "n"))
            actor.do(("retain",))
        actor.do(("commit", step + 3, "m"))
    assert os.readlink(directory / "latest") == f"step_{step + 3}"
    return counted, step


def _check(directory: Path, step: int) -> None:
    older = {"a", "x", "y", "z", ABSENT}
    allowed: Allowed = {number: older for number in range(1, step + 1)}
    allowed |= {step + 1: {ABSENT}, step + 2: {"n"}, step + 3: {"m"}}
    scenario.check(directory, allowed)


def _one(
    directory: Path, checker: Checker, sleeps_at: int, wakes_at: int, facts: Any, way: Break
) -> tuple[bool, str]:
    """Whether the older attempt slept at all, and what is wrong."""

    def breaking(function: Any) -> Any:
        def run(*args: Any) -> Any:
            way()
            return function(*args)

        return run

    children.in_child(_prepare, directory)
    older = Child(breaking(_older), directory, sleeps_at, *facts)
    if not older.is_stopped():
        kind, value = older.result()
        return False, "" if kind == "returned" else f"the older attempt alone {kind}: {value}"
    newer = Child(breaking(_newer), directory, wakes_at, *facts)
    is_waiting = newer.is_stopped()
    older.go_on()
    kind, value = older.result()
    if is_waiting:
        newer.go_on()
    newer_kind, newer_value = newer.result()
    if newer_kind != "returned":
        return True, f"the newer attempt {newer_kind}: {newer_value}"
    if kind != "returned":
        return True, f"the older attempt {kind}: {value}"
    return True, checker.problem(directory, newer_value[1])


@scenario.small_chunks()
def run(plan: Plan) -> Counts:
    """A `share` of the pairs; 1: every call of the older with some of the newer."""
    counts = Counts()
    rng = random.Random(plan.seed)
    directory = plan.root / "checkpoints"
    checker = Checker(_check, plan)
    children.in_child(_prepare, directory)
    num_older = len(children.in_child(_older, directory, -1, True, True))
    shutil.rmtree(directory)
    children.in_child(_prepare, directory)
    num_newer = len(children.in_child(_newer, directory, -1, True, True)[0])
    shutil.rmtree(directory)
    counts.add(calls_of_older=num_older, calls_of_newer=num_newer)
    for sleeps_at in range(num_older):
        for wakes_at in (-1, *rng.sample(range(num_newer), WAKES_PER_SLEEP)):
            facts = (rng.random() < 0.5, rng.random() < 0.5)
            if plan.skips(rng, counts):
                continue
            is_hit, problem = _one(directory, checker, sleeps_at, wakes_at, facts, plan.break_forge)
            counts.hit("zombies", is_hit)
            counts.add(interleavings=is_hit, survived=is_hit and not problem)
            if problem:
                where = f"sleeps at {sleeps_at}, wakes at {wakes_at}, (lock, pid) {facts}"
                counts.failures.append(f"{where}: {problem}")
            shutil.rmtree(directory)
    counts.check_hits()
    checker.close()
    return counts
