"""Values of `run.state` and random number generators: rebuilt, and written into the live ones.

A checkpoint has them as `run_values.py` and `generators.py` describe them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from forge.checkpoint.format.tensor_encoding import is_here
from forge.errors import DamagedCheckpoint, StateMismatch
from forge.state import generators
from forge.state.run_values import is_array

_KINDS = ("torch", "random", "numpy", "numpy RandomState")

_WRONG = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions that an invalid description raises."""


def check(saved: Mapping[str, Any]) -> None:
    """Check the generators before anything is loaded.

    Raises:
        DamagedCheckpoint: If one is invalid.
        StateMismatch: If this machine does not have the device of a generator.
    """
    for one in saved.get("run.state generators", ()):
        check_generator(one)


def unpacked(saved: Mapping[str, Any]) -> Any:
    """Rebuild the tree that was packed.

    Args:
        saved: The tree and the separate lists, by the keys of `RunState.capture`.
    Raises:
        StateMismatch: If a generator cannot be rebuilt here.
    """
    tree = saved.get("run.state", {})
    try:
        for one in saved.get("run.state generators", ()):
            *way, last = one["path"]
            _at(tree, way)[last] = generator(one)
        for path, first in saved.get("run.state shared", ()):
            *way, last = path
            _at(tree, way)[last] = _at(tree, first)
    except (LookupError, TypeError, ValueError) as error:
        raise StateMismatch(f"run.state cannot be restored: {error!r}") from error
    return tree


def _at(tree: Any, way: list[Any]) -> Any:
    for key in way:
        tree = tree[key]
    return tree


class PuttingBack:
    """Writes saved values into live objects of the same kind, if they can be changed.

    An object that was saved once stays one object, and two objects stay two.
    """

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}
        self._used: set[int] = set()

    def put(self, live: Any, saved: Any) -> Any:
        """The saved value; if possible `live`, with the saved content."""
        if id(saved) in self._done:
            return self._done[id(saved)]
        is_free = type(live) is type(saved) and id(live) not in self._used
        if type(saved) in (dict, list):
            target = live if is_free else saved
        else:
            target = _leaf(live, saved, is_free=is_free)
        self._done[id(saved)] = target
        self._used.add(id(target))
        if type(saved) is dict:
            old = dict(live) if is_free else {}
            new = {key: self.put(old.get(key), value) for key, value in saved.items()}
            target.clear()
            target.update(new)
        elif type(saved) is list:
            row = [*(live if is_free else ()), *[None] * len(saved)]
            target[:] = [self.put(a, b) for a, b in zip(row, saved, strict=False)]
        return target


def _leaf(live: Any, saved: Any, *, is_free: bool) -> Any:
    if not is_free:
        return saved
    if type(saved) is torch.Tensor:
        if (live.shape, live.dtype, live.device) != (saved.shape, saved.dtype, saved.device):
            return saved
        with torch.no_grad():
            return live.copy_(saved)
    if is_array(saved):
        can_write = live.flags.writeable and saved.flags.writeable
        if can_write and (live.shape, live.dtype) == (saved.shape, saved.dtype):
            live[...] = saved
            return live
        return saved
    return put_generator_back(live, saved) if generators.is_one(saved) else saved


# -- random number generators ------------------------------------------------------------------


def check_generator(saved: Any) -> None:
    """Check a description before a generator is built from it.

    Raises:
        DamagedCheckpoint: If `described` cannot have returned it.
        StateMismatch: If this machine does not have its device.
    """
    try:
        kind, device = saved["kind"], saved.get("device")
        device = torch.device(device) if kind == "torch" else None
        if kind not in _KINDS:
            raise ValueError(f"its kind is {kind!r:.40}, expected one of {', '.join(_KINDS)}")
    except _WRONG as error:
        raise DamagedCheckpoint(
            f"the saved state of a random number generator cannot be read: {error}"
        ) from error
    if device is not None and not is_here(device):
        raise StateMismatch(
            f"The checkpoint has a random number generator on {device}, which this machine does not"
            " have. Resume on a machine that has this device."
        )


def generator(saved: dict[str, Any]) -> Any:
    """Build a generator from its description.

    Raises:
        DamagedCheckpoint: Like `check_generator`.
        StateMismatch: If it cannot be built here.
    """
    check_generator(saved)
    try:
        return _made_generator(saved)
    except _WRONG as error:
        text = f"A random number generator cannot be built from its saved state: {error!r}"
        raise StateMismatch(text) from error


def _made_generator(saved: dict[str, Any]) -> Any:
    if saved["kind"] == "torch":
        return torch.Generator(device=saved["device"]).set_state(saved["state"])
    if saved["kind"] == "random":
        made = random.Random()
        made.setstate(saved["state"])
        return made
    import numpy

    state = saved["state"]
    kind = getattr(numpy.random, saved.get("bits", state["bit_generator"]), None)
    if not (isinstance(kind, type) and issubclass(kind, numpy.random.BitGenerator)):
        raise StateMismatch(f"numpy has no generator of the kind {state['bit_generator']!r}")
    seeds = saved.get("seeds")
    bits = kind(numpy.random.SeedSequence(**seeds)) if seeds else kind()
    if saved["kind"] == "numpy RandomState":
        legacy = numpy.random.RandomState(bits)
        legacy.set_state(state)
        return legacy
    bits.state = state
    return numpy.random.Generator(bits)


def put_generator_back(live: Any, saved: Any) -> Any:
    """`live`, set to the state of the other generator if possible; else the other generator."""
    if type(live) is not type(saved):
        return saved
    if isinstance(saved, torch.Generator):
        return live.set_state(saved.get_state()) if live.device == saved.device else saved
    if isinstance(saved, random.Random):
        live.setstate(saved.getstate())
        return live
    numpy = sys.modules["numpy"]
    before, after = generators.described(live), generators.described(saved)
    assert before is not None
    assert after is not None
    if before["state"]["bit_generator"] != after["state"]["bit_generator"]:
        return saved
    if isinstance(saved, numpy.random.RandomState):
        live.set_state(after["state"])
        return live
    if not _follow_spawns(live, saved):
        return saved
    live.bit_generator.state = after["state"]
    return live


def _follow_spawns(live: Any, saved: Any) -> bool:
    """Spawn from `live` until it has as many children as `saved`; False if that is impossible."""
    before, after = generators.seeds_of(live), generators.seeds_of(saved)
    if not (before and after) or before["n_children_spawned"] == after["n_children_spawned"]:
        return True
    missing = after["n_children_spawned"] - before["n_children_spawned"]
    source = before | {"n_children_spawned": after["n_children_spawned"]}
    if missing < 0 or repr(source) != repr(after):  # there may be arrays in it
        return False
    live.bit_generator.seed_seq.spawn(missing)
    return True
