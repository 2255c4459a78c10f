"""What becomes of a checkpoint that another number of ranks has saved.

Each rank has what rank 0 had: the step, schedules, the NaN policy, `run.state`, averages of a
BatchNorm; and of what was sharded its own part. The random state is each rank's own where it was
there; a new rank's is derived from that of rank 0. Sums are made in another order from here on.
"""

from __future__ import annotations

from forge import messages
from forge.checkpoint import Checkpoint
from forge.group.group import Group
from forge.state import rng

PERSONAL = ("rng", "ended")
"""Keys of a state that remain each rank's own."""

_SHOWN = 4
"""Tensors that the message names."""


def adapt(found: Checkpoint, ranks: Group) -> None:
    """Make of a state what this rank is to load; nothing where as many ranks have saved it."""
    before, state = found.manifest.world_size, found.state
    if ranks.size == before:
        return
    state["live"]["buckets"] = {}  # of sums that are made otherwise now
    if ranks.rank >= before:
        state["rng"] = rng.derived(state["rng"], ranks.rank)
        state["ended"] = [rng.derived(one, ranks.rank) for one in state["ended"]]
    if ranks.rank and state["epochs"]:
        state["epochs"]["rng"] = rng.derived(state["epochs"]["rng"], ranks.rank)


def described(found: Checkpoint, now: int) -> str:
    """A sentence on what that means."""
    before = found.manifest.world_size
    names = found.differing("live.", "run.state.")
    only = f" Of {messages.few(names, _SHOWN)} each rank had its own: rank 0's is taken."
    return (
        f"{found.path.name} was saved by {before} ranks and is resumed by {now}: sums are made in"
        f" another order from here on, so that the run ends with other last bits than one with"
        f" {before} ranks throughout.{only if names else ''}"
    )
