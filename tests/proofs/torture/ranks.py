"""SIGKILL of one rank at every call to the disk or the group store, while several ranks save.

Three ranks save step 1, then step 2. One rank is killed before, during or after one of its calls;
the others end by themselves. A new group of three ranks then has to read one checkpoint, each rank
its own part, which must not be older than any commit that a rank has seen; then it saves the next.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # else each fork imports it, as it reads
from torture import children, scenario
from torture.calls import CHANGES, WRITES, Call, Interception
from torture.children import Child, Counts, Plan, Shared

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.errors import RankFailed, RankLost
from forge.group import store as group_store
from forge.group.ranks import StoreCoordinator

SIZE, STEPS = 3, (1, 2)
TELLS = ("set", "multi_get", "delete_key")
"""Calls to the group store at which a rank is killed. Polls for other ranks are left out, since
their number is random."""
LANES = 4
"""Groups that run at the same time; ranks mostly wait, for each other and for name resolution."""
LEAVE_S = 5.0
"""Seconds that ranks wait for each other after the last save; a rank killed then costs them all."""

Point = tuple[int, str, int, str]
"""Rank; `disk` or `group`; number of the call; before, halfway or after."""
Visit = Callable[[str, int, Any], Any]
"""Takes `disk` or `group`, the number of a call, and the call (for `group` a function)."""

DONE, IS_HERE = 0, SIZE
"""Offsets in the shared memory, plus the rank: number of saves done; whether the rank is ready."""


def _state(rank: int, step: int) -> dict[str, Any]:
    """State with shared and rank-specific values, as tensors and as numbers."""
    return {
        "step": step,
        "rank": rank,
        "shared": torch.full((33, 70), float(step)),
        "own": torch.arange(1200.0) + 1000 * step + rank,
    }


def _opened(directory: Path, ranks: Any) -> Store:
    """A rank's store, opened as an attempt does: rank 0 claims the directory first."""
    config = CheckpointConfig(keep_last=2)
    if ranks.rank == 0:
        store = Store(directory, config, ranks=ranks)
    ranks.gather("the claim", b"", children.PATIENCE_S)
    return store if ranks.rank == 0 else Store(directory, config, ranks=ranks)


def _commit(store: Store, rank: int, step: int) -> None:
    store.commit(store.snapshot(step, _state(rank, step), copy=False))


@contextlib.contextmanager
def _visited(directory: Path, visit: Visit) -> Any:
    """Pass this rank's calls to the group store and to the disk to `visit`."""
    count = iter(range(1 << 30))

    def told(name: str) -> Any:
        def call(client: Any, *args: Any) -> Any:
            def make() -> Any:
                return getattr(super(Client, client), name)(*args)

            return visit("group", next(count), make)

        return call

    plain = group_store._store
    Client = type("Client", (vars(dist)["TCPStore"],), {name: told(name) for name in TELLS})

    def disk(call: Call) -> Any:
        return visit("disk", call.number, call)

    group_store._store = lambda *args, **options: Client(*args, **options)
    try:
        with Interception(directory, disk, CHANGES):
            yield
    finally:
        group_store._store = plain


def _save_all(rank: int, directory: Path, meeting: str, shared: Shared, visit: Visit) -> str:
    """Save all steps on one rank; returns the error that ended it early, or an empty text."""
    _meet(rank, meeting)
    with _visited(directory, visit):
        group = StoreCoordinator()
        shared[IS_HERE + rank] = 1
        while not all(shared[IS_HERE + one] for one in range(SIZE)):
            time.sleep(0.001)  # no rank is killed while another rank connects to it
        patience_s = LEAVE_S
        try:
            store = _opened(directory, group)
            for done, step in enumerate(STEPS, 1):
                _commit(store, rank, step)
                shared[DONE + rank] = done
            store.close()
            return ""
        except (OSError, RankLost, RankFailed) as error:
            patience_s = 0.0
            return f"{type(error).__name__}: {error}"
        finally:
            group.close(patience_s)


def _meet(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE)


def _killing(point: Point) -> Visit:
    _, kind, number, when = point

    def visit(found: str, count: int, call: Any) -> Any:
        make = call.make if found == "disk" else call
        if (found, count) != (kind, number):
            return make()
        if when == "after":
            with contextlib.suppress(OSError):
                make()
        if when == "halfway" and call.is_halvable:
            call.make_half()
        children.die()
        return None

    return visit


def _count(rank: int, directory: Path, meeting: str, shared: Shared) -> list[tuple[str, int, str]]:
    """All points at which a rank can be killed, from an undisturbed run."""
    found: list[tuple[str, int, str]] = []

    def visit(kind: str, number: int, call: Any) -> Any:
        is_write = kind == "disk" and call.name in WRITES
        whens = ("before", "halfway", "after") if is_write else ("before", "after")
        found.extend((kind, number, when) for when in whens)
        return call.make() if kind == "disk" else call()

    problem = _save_all(rank, directory, meeting, shared, visit)
    assert not problem, problem
    return found


def _resume(rank: int, directory: Path, meeting: str, shared: Shared) -> int:
    """Resume, and save the next step; returns the step resumed from, or 0."""
    _meet(rank, meeting)
    group = StoreCoordinator()
    store = _opened(directory, group)
    found = store.newest()
    step = 0 if found is None else found.manifest.step
    if found is not None:
        expected = _state(rank, step)
        assert scenario.same(found.state, expected), f"rank {rank} read other values than its own"
    _commit(store, rank, step + 1)
    found = store.newest()
    assert found is not None
    assert found.manifest.step == step + 1, "the next save is not there"
    assert scenario.same(found.state, _state(rank, step + 1))
    store.close()
    group.close(children.PATIENCE_S)
    return step


def _ended(root: Path, plan: Plan, do: Callable[..., Any], *args: Any) -> tuple[list[Any], Shared]:
    """Run a function on each rank of a group; returns the ends, and the shared memory."""
    shared, meeting = Shared(), root / "meeting"
    meeting.unlink(missing_ok=True)

    def run(rank: int) -> Any:
        plan.break_forge()
        return do(rank, *args, str(meeting), shared)

    ranks = [Child(run, rank) for rank in range(SIZE)]
    return [one.result() for one in ranks], shared


def _one(root: Path, plan: Plan, point: Point) -> tuple[bool, str]:
    """Whether a rank was killed at this point, and the problem found; empty if there is none."""
    dead, directory = point[0], root / "checkpoints"

    def doomed(rank: int, meeting: str, shared: Shared) -> str:
        visit = _killing(point if rank == dead else (rank, "", -1, ""))
        return _save_all(rank, directory, meeting, shared, visit)

    ends, shared = _ended(root, plan, doomed)
    if ends[dead][0] == "returned":  # with threads the number of calls varies
        return False, "" if not ends[dead][1] else f"undisturbed, it failed: {ends[dead][1]}"
    for rank, (kind, value) in enumerate(ends):
        if kind != ("killed" if rank == dead else "returned"):
            return True, f"rank {rank} {kind}: {value}"
    done = max(shared[DONE + rank] for rank in range(SIZE))
    found, _ = _ended(root, plan, _resume, directory)
    for rank, (kind, value) in enumerate(found):
        if kind != "returned":
            return True, f"fresh rank {rank} {kind}: {value}"
    steps = [value for _, value in found]
    if len(set(steps)) > 1:
        return True, f"the ranks resume from different steps: {steps}"
    if steps[0] not in (done, done + 1):
        return True, f"they resume from {steps[0]}, and {done} had been committed"
    left = [path.name for path in directory.glob(".work_*/*")]
    return True, f"left behind: {left}" if left else ""


def _several(plan: Plan, lane: int, points: list[Point]) -> list[tuple[Point, bool, str]]:
    root = plan.root / f"lane_{lane}"
    found = []
    for point in points:
        root.mkdir()
        found.append((point, *_one(root, plan, point)))
        shutil.rmtree(root)
        if found[-1][2] and plan.is_over_at_failure:
            break
    return found


@scenario.small_chunks()
def run(plan: Plan) -> Counts:
    """Kill a rank at each point at which it can be killed."""
    counts, rng = Counts(), random.Random(plan.seed)
    ends, _ = _ended(plan.root, plan, _count, plan.root / "counted")
    points: list[Point] = []
    for rank, (kind, value) in enumerate(ends):
        if kind != "returned":
            counts.failures.append(f"{children.UNDISTURBED}: undisturbed, {rank} {kind}: {value}")
            return counts
        points += [(rank, *one) for one in value]
    for place in ("disk", "group"):
        counts.add(**{f"points_of_{place}": sum(one[1] == place for one in points)})
    counts.add(killed=0, survived=0)
    chosen = [one for one in points if not plan.skips(rng, counts)]
    rng.shuffle(chosen)
    lanes = [Child(_several, plan, lane, chosen[lane::LANES]) for lane in range(LANES)]
    for lane in lanes:
        kind, value = lane.result(timeout_s=3600.0)
        if kind != "returned":
            raise AssertionError(f"a child {kind}: {value}")
        for (rank, place, number, when), is_hit, problem in value:
            counts.hit(f"rank {rank}", is_hit)
            counts.add(killed=is_hit, survived=is_hit and not problem)
            if problem:
                what = f"rank {rank} killed {when} call {number} of the {place}"
                counts.failures.append(f"{what}: {problem}")
    counts.check_hits()
    return counts
