"""A disk that is truly full: a file system of 1 MiB and 200 files, filled up before each operation.

Needs the right to mount in a namespace of its own: root, or user namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
from pathlib import Path

from torture import children, scenario
from torture.children import Counts, Plan
from torture.errors import check_there
from torture.scenario import Op, World

from forge.errors import CheckpointError

_NEW_MOUNTS, _NEW_USER, _PRIVATE = 0x20000, 0x10000000, 1 << 18 | 1 << 14
PAGE = 4096
ROOMS = [(pages, 100) for pages in range(12)] + [(100, files) for files in range(8)]
"""(pages, files) that are left."""


def mount_small_disk(directory: Path) -> str:
    """In this process alone; says why where it cannot be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid = os.getuid()
    if libc.unshare(_NEW_MOUNTS) and libc.unshare(_NEW_MOUNTS | _NEW_USER):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    if os.getuid() != uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    options = b"size=1m,nr_inodes=200"
    if libc.mount(b"none", b"/", None, _PRIVATE, None) or libc.mount(
        b"tmpfs", os.fsencode(directory), b"tmpfs", 0, options
    ):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return ""


def _fill(disk: Path, pages: int, files: int) -> None:
    """Leave room for so much and no more."""
    ballast = disk / "ballast"
    ballast.mkdir()
    with open(ballast / "bytes", "wb", buffering=0) as file:
        room = os.statvfs(disk)
        file.write(bytes(max(0, room.f_bavail - pages) * PAGE))
    for number in range(max(0, os.statvfs(disk).f_favail - files)):
        os.mknod(ballast / str(number))


def _run(disk: Path, ops: list[Op], worlds: list[World], room: tuple[int, int], at: int) -> bool:
    """The scenario with a disk that is full during one operation; whether that failed."""
    directory = disk / "checkpoints"
    has_failed = False
    actor = scenario.Actor(directory)
    for index, op in enumerate(ops):
        if index == at:
            _fill(disk, *room)
            try:
                actor.do(op)
            except (OSError, CheckpointError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                assert isinstance(cause, OSError)
                assert cause.errno == errno.ENOSPC, f"{error!r}"  # noqa: PT017
                has_failed = True
                check_there(directory, worlds[index], worlds[index + 1])
            shutil.rmtree(disk / "ballast")
        if index != at:
            actor.do(op)
        elif has_failed and op == ("open",):
            actor = scenario.Actor(directory)
        elif has_failed:
            actor.do(op)
    world = scenario.world_of(actor.store)
    assert world == worlds[-1], f"at the end there is {world}, not {worlds[-1]}"
    actor.store.close()
    scenario.check(directory, {step: {tag} for step, tag in world.items()})
    shutil.rmtree(directory)
    return has_failed


def _all(plan: Plan, worlds_of: dict[str, list[World]]) -> Counts:
    counts = Counts()
    problem = mount_small_disk(plan.root)
    if problem:
        counts.add(not_possible=1)
        return counts
    plan.break_forge()
    rng = random.Random(plan.seed)
    for name, ops in scenario.SCENARIOS.items():
        worlds = worlds_of[name]
        for at in range(len(ops)):
            for room in ROOMS:
                if plan.skips(rng, counts):
                    continue
                try:
                    has_failed = _run(plan.root, ops, worlds, room, at)
                    counts.add(filled=1, survived=1, operations_failed=has_failed)
                except Exception:  # noqa: BLE001 - told as a failure
                    counts.add(filled=1)
                    where = f"{name}: {room} (pages, files) left for {ops[at]}"
                    counts.failures.append(f"{where}: {children.traceback.format_exc()}")
                    children.let_go()
                    for path in plan.root.iterdir():
                        shutil.rmtree(path)
    return counts


def run(plan: Plan) -> Counts:
    """Fill the disk before each operation, leaving room for some of it."""
    directory = plan.root / "checkpoints"
    worlds_of = {name: scenario.worlds(name, directory) for name in scenario.SCENARIOS}
    return children.in_child(_all, plan, worlds_of, timeout_s=3600.0)
