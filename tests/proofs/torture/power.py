"""Power cuts at every place of every scenario, on the disk of `disk_model`."""

from __future__ import annotations

import collections
import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from torture import children, scenario
from torture.calls import CHANGES, Interception
from torture.children import Checker, Counts, Plan
from torture.disk_model import Keep, Recorder, build, real_tree, replay, tree_of
from torture.kills import Break
from torture.scenario import ABSENT, Allowed, Op, World

RANDOM_FATES = 6
"""States of each place that are drawn at random, beside those that are always tried."""


def record(root: Path, ops: list[Op], break_forge: Break, is_waiting: bool) -> Recorder:
    """What one run does below `root`; the replay of all of it has to be what is there."""
    break_forge()
    recorder = Recorder(str(root))
    with Interception(root, recorder, (*CHANGES, "open")):
        actor = scenario.Actor(root / "checkpoints", is_waiting=is_waiting)
        for _ in actor.run(ops):
            recorder.completed.append(len(recorder.changes))
        actor.store.wait()
    disk = replay(recorder, len(recorder.changes), lambda number: "keep")
    assert tree_of(recorder, disk) == real_tree(root), "the recording has missed a call"
    actor.store.close()
    recorder.forget_locks()
    return recorder


def allowed_after(worlds: list[World], ops: list[Op], done: int) -> Allowed:
    """What a power cut may leave once `done` operations have returned, and one is under way.

    A commit and a rollback survive it. What `retain` removed may be back, but never in part, until
    the directory is synced for something else.
    """
    if done < 0:
        return {}
    last = min(done + 1, len(ops))
    allowed = scenario.allowed_between(worlds[done], worlds[last])
    for number in range(last, 0, -1):
        kind = ops[number - 1][0]
        if number <= done and kind in ("commit", "final", "discard", "open"):
            break  # these have synced the directory
        if kind in ("retain", "discard"):
            for step, tag in worlds[number - 1].items():
                after = worlds[number].get(step, ABSENT)
                if after != tag:
                    allowed.setdefault(step, set()).update({tag, after})
    return allowed


def fates(recorder: Recorder, place: int, rng: random.Random) -> Iterator[Keep]:
    """Which of the changes that are not synced at `place` are there after the cut."""
    changes = recorder.changes
    pending = [n for n in range(place) if changes[n].synced_at > place]
    is_data = {n: changes[n].kind in ("data", "size") for n in pending}
    yield lambda number: "keep"
    for fate in ("lose", "zero", "tear"):
        yield lambda number, fate=fate: fate if is_data[number] else "keep"
    if not pending:
        return
    yield lambda number: "lose"
    for one in pending:
        yield lambda number, one=one: "lose" if number == one else "keep"
        yield lambda number, one=one: "keep" if number == one else "lose"
    for _ in range(RANDOM_FATES):
        drawn = {
            n: rng.choice(("keep", "lose", "zero", "tear") if is_data[n] else ("keep", "lose"))
            for n in pending
        }
        yield lambda number, drawn=drawn: drawn[number]


@scenario.small_chunks()
def run(plan: Plan) -> Counts:
    """Cut at every place, and check each state that differs."""
    counts = Counts()
    rng = random.Random(plan.seed)
    checker = Checker(scenario.check, plan)
    found: collections.Counter[str] = collections.Counter()
    for name, ops in scenario.SCENARIOS.items():
        worlds = scenario.worlds(name, plan.root / "checkpoints")
        is_waiting = rng.random() < 0.5
        recorder = children.in_child(record, plan.root, ops, plan.break_forge, is_waiting)
        shutil.rmtree(plan.root / "checkpoints")
        counts.add(scenarios=1, places=len(recorder.changes) + 1)
        seen = set()
        for place in range(len(recorder.changes) + 1):
            done = sum(completed <= place for completed in recorder.completed) - 1
            allowed = allowed_after(worlds, ops, done)
            for fate in fates(recorder, place, rng):
                counts.add(cuts=1)
                if plan.skips(rng, counts):
                    continue
                tree = tree_of(recorder, replay(recorder, place, fate))
                key = hashlib.sha1(repr((sorted(tree.items()), done)).encode()).digest()
                if key in seen:
                    continue
                seen.add(key)
                build(tree, plan.root)
                problem = checker.problem(plan.root / "checkpoints", allowed)
                counts.add(states=1, survived=not problem)
                shutil.rmtree(plan.root / "checkpoints", ignore_errors=True)
                if problem:
                    under_way = str(ops[max(done, 0) : done + 1])
                    found[under_way] += 1
                    if found[under_way] <= 3:
                        where = f"{name}: cut at {place} in {under_way}"
                        counts.failures.append(f"{where}: {problem}{sorted(tree)}")
    counts.add(**({"failed": found.total()} if found else {}))
    checker.close()
    return counts
