"""The differences between two runs of a script: leaves of checkpoints, and logged values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from forge.checkpoint.format.leaves import differences, leaves
from forge.rehearse.rehearsal import Logged, RehearsedRun

_OBJECTS = "live."
"""The part of a checkpoint with the objects given to `forge.Run`. The rest can differ between two
uninterrupted runs, for example by a generator that is neither seeded nor used."""
_PLACE = {"taken", "position", "is_over"}
"""Keys of the state of a `forge.data.resumable`: a place in the data, which can differ in the same
way. Objects that read several loaders, such as a trainer's, have several places in their state."""
_MEASURED = "measured"
"""The key in the state of an object for times and the like, which can differ, too."""


def differing_leaves(
    one: RehearsedRun, other: RehearsedRun, tolerance: float = 0.0
) -> Iterator[tuple[str, str]]:
    """(path, difference) of each leaf that differs between their checkpoints."""
    for place in dict.fromkeys([*one.states, *other.states]):
        if place not in one.states or place not in other.states:
            yield place, f"only in {(one if place in one.states else other).name}"
            continue
        # The last logged values are compared with all others, by step.
        a, b = (
            {**_without_directory(run.states[place], str(run.directory)), "metrics": None}
            for run in (one, other)
        )
        near = _near_leaves(a, b, tolerance) if tolerance else set()
        of_run = f" of {place}" if len(one.states) > 1 else ""
        found = ((path, what) for path, what in differences(a, b) if path not in near)
        yield from ((f"{path}{of_run}", what) for path, what in found)


def differing_values(
    one: RehearsedRun, other: RehearsedRun, tolerance: float = 0.0
) -> Iterator[tuple[Logged, str]]:
    """Each logged value that differs, by step, and the difference."""
    a, b = one.logged, other.logged
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key), b.get(key)
        if not are_near(x, y, tolerance):
            yield from ((key, what) for _, what in differences(x, y))


def may_differ(path: str, run: RehearsedRun) -> bool:
    """Whether a leaf is not part of the trained state: uninterrupted runs can differ in it."""
    if not path.startswith(_OBJECTS):
        return True
    objects = [one for state in run.states.values() for one in state["live"]["states"].items()]
    free = [f"{name}.{_MEASURED}" for name, _ in objects]
    free += [place for name, state in objects for place in _places(state, name)]
    return path.startswith(tuple(f"{_OBJECTS}states.{part}." for part in free))


def _places(state: Any, path: str) -> Iterator[str]:
    """The paths of the places in the data within the state of an object."""
    if isinstance(state, dict) and state.keys() >= _PLACE:
        yield path
    elif isinstance(state, dict):
        for key, inner in state.items():
            yield from _places(inner, f"{path}.{key}")
    elif isinstance(state, list):
        for number, inner in enumerate(state):
            yield from _places(inner, f"{path}[{number}]")


def _without_directory(value: Any, directory: str) -> Any:
    """The same with paths relative to the run's own directory, as every run has another one."""
    if isinstance(value, str):
        return value.replace(directory, "…")
    if isinstance(value, dict):
        return {
            _without_directory(name, directory): _without_directory(inner, directory)
            for name, inner in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_without_directory(inner, directory) for inner in value)
    return value


def _near_leaves(a: Any, b: Any, tolerance: float) -> set[str]:
    others = {leaf.path: leaf.value for leaf in leaves(b)}
    return {
        leaf.path
        for leaf in leaves(a)
        if leaf.path in others and are_near(leaf.value, others[leaf.path], tolerance)
    }


def are_near(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two numbers, or tensors, differ by at most `tolerance` times the largest number."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance * max(abs(a), abs(b)) and bool(tolerance)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and tolerance):
        return False
    is_alike = a.shape == b.shape and a.dtype == b.dtype and a.layout is b.layout is torch.strided
    if not is_alike or not a.is_floating_point() or not a.numel():
        return False
    x, y = a.double(), b.double()
    return bool((x - y).abs().max() <= tolerance * torch.maximum(x.abs().max(), y.abs().max()))
