"""Random number generators: which can be saved, and their description for a checkpoint.

`putting_back.py` rebuilds them from it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


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
        return {**kind, "state": state, "seeds": seeds_of(value)}
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return {"kind": "numpy RandomState", "state": value.get_state(legacy=False)}
    return None


def seeds_of(generator: Any) -> dict[str, Any] | None:
    """The SeedSequence that its `spawn` uses; None if numpy does not expose it."""
    sequence: Any = getattr(generator.bit_generator, "seed_seq", None)
    return sequence.state if hasattr(sequence, "n_children_spawned") else None
