"""Damage of every kind to every file: what is read has the exact values, or is reported."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torture import children, scenario
from torture.children import Counts, Plan

from forge.checkpoint.format.manifest import NAME as MANIFEST
from forge.checkpoint.format.manifest import STATE, TENSORS
from forge.checkpoint.store import Store

FILES = (MANIFEST, STATE, TENSORS)
FLIPS = 10_000
"""Bits flipped with a share of 1, over all files."""

LENGTHS = 400
"""Truncations of each file."""

_MEMORY = 1 << 30
"""Bytes beyond what a process has that reading a damaged checkpoint may ask for."""


class Victim:
    """Two checkpoints, of which the newer one is damaged and made whole again."""

    def __init__(self, directory: Path) -> None:
        self.store = scenario.open_store(directory)
        scenario.commit(self.store, 1, "a")
        scenario.commit(self.store, 2, "b")
        self.path = directory / "step_2"
        self.pristine = {name: (self.path / name).read_bytes() for name in FILES}

    def damaged(self, name: str, content: bytes) -> str:
        """How a file with other content is read."""
        (self.path / name).write_bytes(content)
        try:
            return read(self.store)
        finally:
            (self.path / name).write_bytes(self.pristine[name])

    def replaced(self, name: str, make: Callable[[Path], object]) -> str:
        """How it is read with something else in the place of a file."""
        path = self.path / name
        path.unlink()
        make(path)
        try:
            return read(self.store)
        finally:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            path.write_bytes(self.pristine[name])


def read(store: Store) -> str:
    """`told` where the damage was noticed and the older one is taken, or `same values`."""
    found = store.newest()
    assert found is not None
    step = found.manifest.step
    expected = scenario.state_of(step, "ab"[step - 1])
    assert scenario.same(found.state, expected), f"other values of step {step} in silence"
    assert type(step) is int
    assert step == 2 or store.passed_over
    return "told" if step == 1 else "same values"


def within_memory(function: Callable[[], Any], more: int = _MEMORY) -> Any:
    """Run it with an address space that cannot grow by much."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    return function()


def _flips(victim: Victim, plan: Plan, counts: Counts) -> None:
    rng = random.Random(plan.seed)
    sizes = [len(victim.pristine[name]) for name in FILES]
    for number in range(FLIPS):
        # Half of them evenly over the files, half over their bytes.
        name = rng.choice(FILES) if number % 2 else rng.choices(FILES, sizes)[0]
        content = bytearray(victim.pristine[name])
        place = rng.randrange(8 * len(content))
        if plan.skips(rng, counts):
            continue
        content[place // 8] ^= 1 << place % 8
        _note(counts, "flips", f"bit {place} of {name}", lambda: victim.damaged(name, content))  # noqa: B023


def _note(counts: Counts, kind: str, what: str, attempt: Callable[[], str]) -> None:
    try:
        outcome = attempt()
        counts.add(**{kind: 1, f"{kind}_{outcome.replace(' ', '_')}": 1})
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is no CheckpointError
        counts.add(**{kind: 1})
        counts.failures.append(f"{what}: {type(error).__name__}: {error}")


def _truncations(victim: Victim, plan: Plan, counts: Counts) -> None:
    rng = random.Random(plan.seed)
    for name in FILES:
        content = victim.pristine[name]
        sizes = {0, 1, 7, 8, 9, len(content) - 1, *rng.choices(range(len(content)), k=LENGTHS)}
        for size in sorted(sizes):
            if not plan.skips(rng, counts):
                cut = content[:size]
                _note(counts, "cuts", f"{name}[:{size}]", lambda: victim.damaged(name, cut))  # noqa: B023
        for block in range(0, len(content), 512):
            zeroed = content[:block] + bytes(512) + content[block + 512 :]
            if zeroed[: len(content)] != content and not plan.skips(rng, counts):
                zeroed = zeroed[: len(content)]
                _note(counts, "zeroed", f"{name} {block}", lambda: victim.damaged(name, zeroed))  # noqa: B023


def _replacements(victim: Victim) -> Iterator[tuple[str, str, Callable[[Path], object]]]:
    other = victim.store.directory / "step_1"
    for name in FILES:
        content = victim.pristine[name]
        kept = victim.store.directory / f"kept_{name}"
        kept.write_bytes(content)
        yield name, "missing", lambda path: None
        yield name, "zeros", lambda path, content=content: path.write_bytes(bytes(len(content)))
        yield name, "of another step", lambda path, name=name: shutil.copy(other / name, path)
        yield name, "a link to it", lambda path, kept=kept: path.symlink_to(kept)
        yield name, "a link to itself", lambda path: path.symlink_to(path.name)
        yield name, "a device", lambda path: path.symlink_to("/dev/zero")
        yield name, "a directory", Path.mkdir
        yield name, "a fifo", os.mkfifo
        yield name, "a terabyte", lambda path: (path.touch(), os.truncate(path, 1 << 40))
        yield name, "longer", lambda path, content=content: path.write_bytes(content + b"\0")
        yield name, "unreadable", lambda path: path.mkdir(0)


def _all(plan: Plan) -> Counts:
    counts = Counts()
    victim = Victim(plan.root / "checkpoints")
    plan.break_forge()
    _flips(victim, plan, counts)
    _truncations(victim, plan, counts)
    for name, kind, make in _replacements(victim):
        what = f"{name} is {kind}"
        _note(counts, "replaced", what, lambda: victim.replaced(name, make))  # noqa: B023
    assert read(victim.store) == "same values"
    victim.store.close()
    return counts


def run(plan: Plan) -> Counts:
    """Damage each file, in a process that cannot have much more memory."""
    counts = Counts()
    counts.take(children.in_child(within_memory, lambda: _all(plan), timeout_s=3600.0))
    return counts
