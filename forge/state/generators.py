"""Generators of random numbers: what each is made of again, and how it is put back in place."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from forge.errors import StateMismatch


def is_one(value: Any) -> bool:
    """Whether it is a generator that can be saved."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return True
    return isinstance(value, torch.Generator) or type(value) is random.Random


def described(value: Any) -> dict[str, Any] | None:
    """What a generator is made of again; None where it is none."""
    if isinstance(value, torch.Generator):
        return {"kind": "torch", "device": str(value.device), "state": value.get_state()}
    if type(value) is random.Random:
        return {"kind": "random", "state": value.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        state, seeds = value.bit_generator.state, _seeds(value)
        return {"kind": "numpy", "bits": state["bit_generator"], "state": state, "seeds": seeds}
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return {"kind": "numpy RandomState", "state": value.get_state(legacy=False)}
    return None


def made(saved: dict[str, Any]) -> Any:
    """A generator as it was described.

    Raises:
        StateMismatch: For one of a kind that is not known here.
    """
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
    """`live` as the other one is, where it can be changed so; else the other one."""
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
    """Where its `spawn` takes children from; None where numpy does not say."""
    sequence: Any = getattr(generator.bit_generator, "seed_seq", None)
    return sequence.state if hasattr(sequence, "n_children_spawned") else None


def _follow_spawns(live: Any, saved: Any) -> bool:
    """Let `live` have spawned as many as `saved`; False where it has spawned more, or others."""
    before, after = _seeds(live), _seeds(saved)
    if not (before and after) or before["n_children_spawned"] == after["n_children_spawned"]:
        return True
    missing = after["n_children_spawned"] - before["n_children_spawned"]
    source = before | {"n_children_spawned": after["n_children_spawned"]}
    if missing < 0 or repr(source) != repr(after):  # there may be arrays in them
        return False
    live.bit_generator.seed_seq.spawn(missing)
    return True
