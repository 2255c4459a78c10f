"""Generators of random numbers: what each is made of again, and how it is put back in place."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from forge.checkpoint.format.outline import is_here
from forge.errors import CheckpointError, DamagedCheckpoint, StateMismatch

_MAX_POOL = 1 << 10
"""Words of a SeedSequence's pool: it takes a time that grows with their square, and 4 are usual."""

_MAX_BITS = 1 << 16
"""Of what a SeedSequence is made of: 128 are usual."""

_MAX_CHILDREN = 1 << 22
"""Children that are spawned anew, so that a live generator has spawned as many: seconds."""

_KINDS = ("torch", "random", "numpy", "numpy RandomState")

_AT_ONCE = 1 << 12

_WRONG = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""What comes of a description that is none."""


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
        if problem := _problem(seeds):
            raise CheckpointError(f"A generator of numpy cannot be saved: {problem}.")
        return {"kind": "numpy", "bits": state["bit_generator"], "state": state, "seeds": seeds}
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return {"kind": "numpy RandomState", "state": value.get_state(legacy=False)}
    return None


def _problem(seeds: Any) -> str | None:
    """Why a SeedSequence would take too long to make; None if it does not."""
    if not seeds:
        return None
    pool = seeds["pool_size"]
    if type(pool) is not int or not 0 < pool <= _MAX_POOL:
        return f"its seeds have pool_size={pool!r:.40}, expected a number up to {_MAX_POOL}"
    size = sum(map(_num_bits, [seeds["entropy"], *seeds["spawn_key"]]))
    return f"its seeds have more than {_MAX_BITS} bits" if size > _MAX_BITS else None


def _num_bits(entropy: Any) -> int:
    if entropy is None or isinstance(entropy, int):
        return (entropy or 0).bit_length()
    return 64 * len(entropy)


def check(saved: Any) -> None:
    """Look at what was described before anything is made of it.

    Raises:
        DamagedCheckpoint: If it is nothing that `described` returns.
        StateMismatch: If its device is not here.
    """
    try:
        problem = _problem(saved.get("seeds"))
        if saved["kind"] not in _KINDS:
            problem = f"its kind is {saved['kind']!r:.40}, expected one of {', '.join(_KINDS)}"
        device = torch.device(saved["device"]) if saved["kind"] == "torch" else None
    except _WRONG as error:
        raise DamagedCheckpoint(
            f"a generator of random numbers cannot be read: {error!r}"
        ) from error
    if problem:
        raise DamagedCheckpoint(f"a generator of random numbers cannot be read: {problem}")
    if device is not None and not is_here(device):
        raise StateMismatch(
            f"The checkpoint has a generator of random numbers on {device}, which this machine does"
            " not have. Resume on a machine that has it."
        )


def made(saved: dict[str, Any]) -> Any:
    """A generator as it was described.

    Raises:
        DamagedCheckpoint: As `check`.
        StateMismatch: If it cannot be made here.
    """
    check(saved)
    try:
        return _made(saved)
    except _WRONG as error:
        text = f"A generator of random numbers cannot be made as it was saved: {error!r}"
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
    if not 0 < missing <= _MAX_CHILDREN or repr(source) != repr(after):  # there may be arrays in it
        return False
    for begin in range(0, missing, _AT_ONCE):
        live.bit_generator.seed_seq.spawn(min(_AT_ONCE, missing - begin))
    return True
