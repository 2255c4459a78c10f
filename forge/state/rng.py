"""The random state of a process: python, numpy, torch on the CPU and on all other devices."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forge.errors import CheckpointError

DEVICES = ("cuda", "xpu", "mps")
"""Device types with their own generators."""


def capture() -> dict[str, Any]:
    """The state of all generators."""
    state = capture_cpu()
    for kind in DEVICES:
        module = getattr(torch, kind, None)
        # An unused device has drawn nothing; MPS does not tell whether it was used.
        if module is None or not getattr(module, "is_initialized", lambda: True)():
            continue
        states = [module.get_rng_state(device) for device in range(module.device_count())]
        if states:
            state[kind] = states
            state["current"] = state.get("current", {}) | {kind: _current(module)}
    return state


def _current(module: Any) -> int:
    """The default device for random numbers."""
    return int(getattr(module, "current_device", lambda: 0)())


def capture_cpu() -> dict[str, Any]:
    """The state of the generators for the CPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_values(numpy)
    return state


def _numpy_values(numpy: Any) -> list[Any]:
    found = _numpy_state(numpy)
    # As bytes of a defined layout: torch's uint32 tensors support few operations.
    words = torch.frombuffer(bytearray(found["state"]["key"].tobytes()), dtype=torch.uint8)
    position, has_gauss = int(found["state"]["pos"]), int(found["has_gauss"])
    return [words, position, has_gauss, float(found["gauss"])]


def _numpy_state(numpy: Any) -> Any:
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is a {found['bit_generator']}, and forge can only save an"
            " MT19937, numpy's default. Remove the call of numpy.random.set_bit_generator. To draw"
            " from another generator, seed it from the global one at each use:"
            " numpy.random.default_rng(numpy.random.randint(2**31))."
        )
    return found


def seed_cpu(seed: int) -> None:
    """Seed the generators of `capture_cpu`.

    Args:
        seed: A 64-bit integer.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def restore(state: dict[str, Any]) -> None:
    """Restore all generators to a captured state."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    for kind in DEVICES:
        module = getattr(torch, kind, None)
        if kind in state and module is not None:
            for device, one in enumerate(state[kind][: module.device_count()]):
                module.set_rng_state(one.cpu(), device)
            # If a rank now has another GPU, or sees others, its generator continues as it was.
            before, now = state.get("current", {}).get(kind), _current(module)
            if before not in (None, now) and module.device_count():
                module.set_rng_state(state[kind][before].cpu(), now)


@contextmanager
def unchanged() -> Iterator[None]:
    """Restore all generators at the end of the block."""
    kept = capture()
    try:
        yield
    finally:
        restore(kept)


def _restore_numpy(saved: Any) -> None:
    import numpy

    _numpy_state(numpy)
    words, position, has_gauss, gauss = saved
    key = numpy.frombuffer(bytes(words.tolist()), dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))
