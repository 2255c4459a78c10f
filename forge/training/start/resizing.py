"""Resuming a checkpoint with another number of ranks than saved it.

Each rank gets rank 0's state (the step, schedules, the NaN policy, `run.state`, BatchNorm
averages) and its own part of sharded tensors. A rank that existed before keeps its random state; a
new rank's is derived from that of rank 0. From then on sums are computed in another order.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from forge import messages
from forge.checkpoint.reading import Checkpoint
from forge.group.group import Coordinator
from forge.state import rng

_SHOWN = 4
"""Number of tensors that the message lists."""


def adapt(found: Checkpoint, ranks: Coordinator) -> None:
    """Change a loaded state to the one that this rank needs."""
    before, state = found.manifest.world_size, found.state
    state["live"]["buckets"] = {}  # of all-reduces that are computed differently now
    if ranks.rank >= before:
        state["rng"] = derived(state["rng"], ranks.rank)
        state["ended"] = [derived(one, ranks.rank) for one in state["ended"]]
    if ranks.rank and state["epochs"]:
        state["epochs"]["rng"] = derived(state["epochs"]["rng"], ranks.rank)


def described(found: Checkpoint, now: int) -> str:
    """A sentence that explains the consequences."""
    before = found.manifest.world_size
    names = found.differing("live.", "run.state.")
    listed = messages.truncate_list(names, _SHOWN)
    only = f" {listed} differed between ranks: the value of rank 0 is used."
    return (
        f"{found.path.name} was saved by {before} ranks and is resumed by {now}: from now on sums"
        f" are computed in another order, so the last bits differ from those of a run with"
        f" {before} ranks throughout.{only if names else ''}"
    )


def derived(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Derive another random state, always the same for the same state and number.

    Args:
        state: A captured state.
        number: A rank without its own saved state.
    """
    words = bytes(state["torch"].cpu().tolist()) + number.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    with rng.unchanged():
        rng.seed_cpu(seed)
        made = {**state, **rng.capture_cpu()}
    for kind in rng.DEVICES:
        if kind in state and getattr(torch, kind).is_available():
            devices = [torch.device(kind, index) for index in range(len(state[kind]))]
            generators = [torch.Generator(device=device).manual_seed(seed) for device in devices]
            made[kind] = [one.get_state() for one in generators]
    return made
