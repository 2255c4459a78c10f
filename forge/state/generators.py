"""Random number generators: a description for a checkpoint, and rebuilding them from it."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from forge.checkpoint.format.tensor_encoding import is_here
from forge.errors import DamagedCheckpoint, StateMismatch

_KINDS = ("torch", "random", "numpy", "numpy RandomState")

_WRONG = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions that an invalid description raises."""


def is_one(value: Any) -> bool:
    """Whether it is a generator that can be saved."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return True
    return isinstance(value, torch.Generator) or type(value) is random.Random


def described(value: Any) -> dict[str, Any] | None:
    """The description of a generator; None if it is not a generator."""
    if isinstance(value, torch.Generator):
        return {"kind": "torch", "device": str(value.device), "state": value.get_state()}
    if type(value) is random.Random:
        return {"kind": "random", "state": value.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        state = value.bit_generator.state
        kind = {"kind": "numpy", "bits": state["bit_generator"]}
        return {**kind, "state": state, "seeds": _seeds(value)}
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return {"kind": "numpy RandomState", "state": value.get_state(legacy=False)}
    return None


def check(saved: Any) -> None:
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


def made(saved: dict[str, Any]) -> Any:
    """Build a generator from its description.

    Raises:
        DamagedCheckpoint: Like `check`.
        StateMismatch: If it cannot be built here.
    """
    check(saved)
    try:
        return _made(saved)
    except _WRONG as error:
        text = f"A random number generator cannot be built from its saved state: {error!r}"
        raise StateMismatch(text) from error


def _made(saved: dict[str, Any]) -> Any:
    if saved["kind"] == "torch":
        return torch.Generator(device=saved["device"]).set_state(saved["state"])
    if saved["kind"] == "random":
        generator = random.Random()
        generator.setstate(saved["state"])
        return generator
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


def put_back(live: Any, saved: Any) -> Any:
    """`live`, set to the state of the other generator if possible; else the other generator."""
    if type(live) is not type(saved):
        return saved
    if isinstance(saved, torch.Generator):
        return live.set_state(saved.get_state()) if live.device == saved.device else saved
    if isinstance(saved, random.Random):
        live.setstate(saved.getstate())
        return live
    numpy = sys.modules["numpy"]
    before, after = described(live), described(saved)
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


def _seeds(generator: Any) -> dict[str, Any] | None:
    """The SeedSequence that its `spawn` uses; None if numpy does not expose it."""
    sequence: Any = getattr(generator.bit_generator, "seed_seq", None)
    return sequence.state if hasattr(sequence, "n_children_spawned") else None


def _follow_spawns(live: Any, saved: Any) -> bool:
    """Spawn from `live` until it has as many children as `saved`; False if that is impossible."""
    before, after = _seeds(live), _seeds(saved)
    if not (before and after) or before["n_children_spawned"] == after["n_children_spawned"]:
        return True
    missing = after["n_children_spawned"] - before["n_children_spawned"]
    source = before | {"n_children_spawned": after["n_children_spawned"]}
    if missing < 0 or repr(source) != repr(after):  # there may be arrays in it
        return False
    live.bit_generator.seed_seq.spawn(missing)
    return True
