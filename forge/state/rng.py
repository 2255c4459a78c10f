"""The random state of a process: python, numpy, torch on the CPU and on every other device."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from forge.errors import StateMismatch

_DEVICES = ("cuda", "xpu", "mps")
"""Kinds of device that draw from generators of their own."""


def capture() -> dict[str, Any]:
    """Every generator's state; takes about 30 microseconds on a CPU."""
    state = capture_cpu()
    for kind in _DEVICES:
        module = getattr(torch, kind, None)
        # Before it is used a device has drawn nothing; of MPS nothing tells.
        if module is None or not getattr(module, "is_initialized", lambda: True)():
            continue
        states = [module.get_rng_state(device) for device in range(module.device_count())]
        if states:
            state[kind] = states
    return state


def capture_cpu() -> dict[str, Any]:
    """The state of the generators that draw on the CPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":
            # As bytes of known layout: torch has tensors of uint32, but few operations on them.
            raw = bytearray(found["state"]["key"].tobytes())
            words = torch.frombuffer(raw, dtype=torch.uint8)
            position, has_gauss = int(found["state"]["pos"]), int(found["has_gauss"])
            found = ["MT19937", words, position, has_gauss, float(found["gauss"])]
        state["numpy"] = found
    return state


def seed_cpu(seed: int) -> None:
    """Seed the generators of `capture_cpu`, numpy's of whatever kind it is.

    Args:
        seed: Of 64 bits.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    kind = type(numpy.random.get_bit_generator()) if hasattr(numpy.random, _GLOBAL) else None
    if kind in (None, numpy.random.MT19937):
        numpy.random.seed(seed & 0xFFFFFFFF)
    else:  # where `numpy.random.seed` would keep a normal number that waits
        numpy.random.set_state(kind(seed).state)


_GLOBAL = "get_bit_generator"
"""Not in numpy before 1.24, whose global generator is of one kind."""


def restore(state: dict[str, Any]) -> None:
    """Put every generator back to a captured state.

    Raises:
        StateMismatch: Where numpy's global generator is of another kind now.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    for kind in _DEVICES:
        module = getattr(torch, kind, None)
        if kind in state and module is not None:
            for device, one in enumerate(state[kind][: module.device_count()]):
                module.set_rng_state(one.cpu(), device)


def _restore_numpy(saved: Any) -> None:
    import numpy

    if not isinstance(saved, dict):
        kind, words, position, has_gauss, cached = saved
        key = numpy.frombuffer(bytes(words.tolist()), dtype=numpy.uint32)
        inner = {"key": key, "pos": position}
        saved = {"bit_generator": kind, "state": inner, "has_gauss": has_gauss, "gauss": cached}
    expected = saved["bit_generator"]
    found = numpy.random.get_state(legacy=False)["bit_generator"]
    if found != expected:
        raise StateMismatch(
            f"numpy's global generator: expected {expected}, found {found}. Call"
            f" numpy.random.set_bit_generator with a {expected} before the run begins."
        )
    numpy.random.set_state(saved)
