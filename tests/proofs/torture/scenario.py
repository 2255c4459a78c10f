"""Operations of a job on its checkpoint directory, and the content required after each of them.

A world is the content of a directory: step -> tag. The tag determines all values of a checkpoint,
and includes the end mark and the state of a finished training (`final_step_<N>`). `worlds` runs a
scenario undisturbed and records the world after every operation. A run that is disturbed during
operation k has to leave, for each step, the checkpoint of world k-1 or of world k.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torture import children

from forge.checkpoint import files, staging, store, writing
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import FINAL
from forge.checkpoint.format.tensor_encoding import PAGE
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.errors import DamagedCheckpoint

TENSORS = "tensors_rank00000.safetensors"
Op = tuple[Any, ...]
World = dict[int, str]
ABSENT, DAMAGED = "absent", "damaged"

SCENARIOS: dict[str, list[Op]] = {
    "grow": [op for step in (1, 2, 3, 4) for op in (("commit", step, "a"), ("retain",))],
    "replace": [
        ("commit", 1, "a"),
        ("commit", 2, "a"),
        ("commit", 2, "b"),
        ("retain",),
        ("commit", 2, "c"),
    ],
    "damaged": [
        ("commit", 1, "a"),
        ("commit", 2, "a"),
        ("damage", 2),
        ("commit", 2, "b"),
        ("retain",),
    ],
    "rollback": [
        ("commit", 1, "a"),
        ("commit", 2, "a"),
        ("commit", 3, "a"),
        ("discard", 1),
        ("commit", 2, "b"),
        ("retain",),
    ],
    "reopen": [
        ("commit", 1, "a"),
        ("open",),
        ("commit", 2, "a"),
        ("retain",),
        ("open",),
        ("read",),
        ("commit", 3, "a"),
        ("retain",),
        ("read",),
    ],
    # Training ends, the state changes after the last loop, and then the training is extended.
    "finish": [
        ("commit", 1, "a"),
        ("commit", 2, "a"),
        ("final", 2, "f"),
        ("mark", 2),
        ("retain",),
        ("open",),
        ("commit", 3, "a"),
        ("retain",),
        ("mark", 3),
    ],
}


def state_of(step: int, tag: str) -> dict[str, Any]:
    """State whose values all depend on step and tag, in tensors of several sizes and types."""
    value = step * 1000 + ord(tag)
    return {
        "step": step,
        "tag": tag,
        "weights": torch.full((33, 70), float(value)),
        "count": torch.tensor(value),
        "mask": torch.arange(13) % (step + 2) == 0,
        "options": [{"lr": 0.1 * value, "betas": (0.9, 0.999)}, None],
    }


def open_store(directory: Path) -> Store:
    return Store(directory, CheckpointConfig(keep_last=2))


def commit(store: Store, step: int, tag: str) -> None:
    store.commit(store.snapshot(step, state_of(step, tag), copy=False))


def commit_final(store: Store, step: int, tag: str) -> None:
    """Commit the final state of a training, in addition to that of its last step."""
    store.commit(store.snapshot(step, state_of(step, tag), copy=False, is_final=True))


def damage(directory: Path, step: int) -> None:
    """Overwrite the last byte of the tensors, as a failing disk could."""
    fd = os.open(directory / f"step_{step}" / TENSORS, os.O_RDWR)
    try:
        os.pwrite(fd, b"\xee", os.fstat(fd).st_size - 1)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    """Small files have several chunks, so that two threads write them."""
    modules = (files, staging, manifest, writing)
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "CHUNK", PAGE))
        described = functools.partial(manifest.Manifest, chunk_bytes=PAGE)
        stack.enter_context(mock.patch.object(store, "Manifest", described))
        yield


class Actor:
    """Runs the operations one after the other, with its own store.

    With `is_waiting` each operation waits for its deletions, so that all runs make about the same
    calls. Otherwise files are deleted in the background, as during training.
    """

    def __init__(self, directory: Path, is_waiting: bool = True) -> None:
        self.directory = directory
        self.is_waiting = is_waiting
        self.store = open_store(directory)
        self.read_step: int | None = None
        """Step of the checkpoint that the last operation has read."""

    def do(self, op: Op) -> None:
        kind, *args = op
        if kind == "commit":
            commit(self.store, *args)
        elif kind == "final":
            commit_final(self.store, *args)
        elif kind == "mark":
            self.store.mark_complete(*args)
        elif kind == "retain":
            self.store.retain()
        elif kind == "discard":
            self.store.discard_after(*args)
        elif kind == "read":
            self.read_step = None
            found = self.store.newest()
            self.read_step = None if found is None else found.manifest.step
        elif kind == "damage":
            damage(self.directory, *args)
            self.store.newest()
        elif kind == "open":
            self.store.close()
            self.store = open_store(self.directory)
        if self.is_waiting:
            self.store.wait()

    def run(self, ops: list[Op]) -> Iterator[int]:
        """Yield the number of operations done, starting with 0."""
        yield 0
        for number, op in enumerate(ops, 1):
            self.do(op)
            yield number


def same(one: Any, other: Any) -> bool:
    """Equal in every bit and type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tag_of(store: Store, path: Path) -> str:
    """The tag of a checkpoint, or DAMAGED; any other value in it raises AssertionError."""
    try:
        found = store.read(path)
    except DamagedCheckpoint:
        return DAMAGED
    tag = found.state["tag"]
    expected = state_of(found.manifest.step, tag)
    assert same(found.state, expected), f"{path.name} was read in silence with other values"
    assert path.name.removeprefix(FINAL) == f"step_{found.manifest.step}"
    return f"{tag}, finished" if found.manifest.is_complete else str(tag)


def world_of(store: Store) -> World:
    """The world of the directory of this store."""
    world = {}
    for path in sorted(store.directory.glob("step_*"), key=str):
        final = path.with_name(FINAL + path.name)
        more = f"; {final.name}: {tag_of(store, final)}" if final.exists() else ""
        world[int(path.name[5:])] = tag_of(store, path) + more
    return world


_worlds_of: dict[str, list[World]] = {}
"""Of each scenario; they are the same for all parts."""


def worlds(name: str, directory: Path) -> list[World]:
    """The worlds of an undisturbed run of a scenario, which a fork makes below `directory`."""
    if name not in _worlds_of:
        _worlds_of[name] = children.in_child(_worlds, directory, SCENARIOS[name])
    return _worlds_of[name]


def _worlds(directory: Path, ops: list[Op]) -> list[World]:
    """The worlds, with a check of each operation's result."""
    actor = Actor(directory)
    found = []
    for number in actor.run(ops):
        found.append(world_of(actor.store))
        kind, *args = ops[number - 1] if number else ("",)
        if kind == "commit":
            assert found[-1][args[0]] == args[1]
            assert actor.store.newest().manifest.step == max(found[-1])
        if kind in ("final", "mark"):
            assert found[-1] != found[-2]
        if kind == "discard":
            assert max(found[-1]) == args[0]
    actor.store.close()
    shutil.rmtree(directory)
    return found


Allowed = dict[int, set[str]]


def allowed_between(before: World, after: World) -> Allowed:
    """For each step, the tags that are allowed during the operation between two worlds."""
    return {
        step: {before.get(step, ABSENT), after.get(step, ABSENT)}
        for step in before.keys() | after.keys()
    }


def check(directory: Path, allowed: Allowed) -> None:
    """Check that the next attempt finds all guaranteed checkpoints, cleans up, and saves.

    Raises:
        AssertionError: A guarantee is broken; the message names it.
    """
    store = open_store(directory)
    try:
        world = world_of(store)
        for step in allowed.keys() | world.keys():
            there, expected = world.get(step, ABSENT), allowed.get(step, {ABSENT})
            assert there in expected, f"step_{step} is {there}, not {' or '.join(expected)}"
        good = [step for step, tag in world.items() if not tag.startswith(DAMAGED)]
        newest = store.newest() if good or not world else None
        if good:
            assert newest is not None
            assert newest.manifest.step == max(good), "the newest good one was not taken"
        latest = directory / "latest"
        assert latest.exists() or not latest.is_symlink(), "`latest` names nothing"
        assert latest.exists() or not good or len(good) == 1, "there is no `latest`"
        next_step = max(world, default=0) + 1
        commit(store, next_step, "n")
        found = store.newest()
        assert found is not None
        assert found.manifest.step == next_step, "the next save is not there"
        assert same(found.state, state_of(next_step, "n"))
        store.retain()
        assert store.newest() is not None
        if good:
            assert (directory / f"step_{max(good)}").exists(), "retain removed what it has to keep"
    finally:
        store.close()
    hidden = {name for name in os.listdir(directory) if name.startswith(".")}
    assert hidden <= {".lock", ".lock.kept", ".fence.json"}, f"leftovers: {sorted(hidden)}"
    others = {p.name for p in directory.iterdir() if not p.name.startswith((".", "step_"))}
    assert others <= {"latest"}, f"leftovers: {sorted(others)}"
