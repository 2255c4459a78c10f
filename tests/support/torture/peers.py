"""For comparison: the same state written by others, a bit flipped, and read by them again."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torture import children, damage, scenario
from torture.children import Counts, Plan

Load = Callable[[], Any]


def _torch(state: dict[str, Any], folder: Path) -> Load:
    path = folder / "state.pt"
    torch.save(state, path)
    return lambda: torch.load(path, weights_only=True)


def _safetensors(state: dict[str, Any], folder: Path) -> Load:
    from safetensors.torch import load_file, save_file

    path = folder / "state.safetensors"
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, path)  # it holds nothing else
    return lambda: state | load_file(path)


def _dcp(state: dict[str, Any], folder: Path) -> Load:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder, no_dist=True)

    def load() -> dict[str, Any]:
        into = {
            name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        dcp.load(into, checkpoint_id=folder, no_dist=True)
        return into

    return load


PEERS = {"torch_load": _torch, "safetensors": _safetensors, "dcp": _dcp}


def _compare(plan: Plan) -> Counts:
    counts = Counts()
    warnings.simplefilter("ignore")  # of odd protocols, by the thousand
    logging.disable()
    state = scenario.state_of(2, "b")
    for name, write in PEERS.items():
        folder = plan.root / name
        folder.mkdir()
        load = write(state, folder)
        assert scenario.same(load(), state), name
        files = [(path, path.read_bytes()) for path in sorted(folder.iterdir())]
        sizes = [len(content) for _, content in files]
        rng = random.Random(plan.seed)
        for _ in range(damage.FLIPS):
            ((path, pristine),) = rng.choices(files, sizes)
            place = rng.randrange(8 * len(pristine))
            if not plan.skips(rng, counts):
                flipped = bytearray(pristine)
                flipped[place // 8] ^= 1 << place % 8
                path.write_bytes(flipped)
                counts.add(**{f"{name}_{_outcome(load, state)}": 1})
                path.write_bytes(pristine)
    return counts


def _outcome(load: Load, expected: Any) -> str:
    try:
        return "right" if scenario.same(load(), expected) else "wrong_in_silence"
    except BaseException:  # noqa: BLE001 - of whatever kind: that of DCP is no Exception
        return "told"


def run(plan: Plan) -> Counts:
    """Flip single bits of what peers have written, and count what they tell of."""
    return children.in_child(_compare, plan, timeout_s=3600.0)  # type: ignore[no-any-return]
