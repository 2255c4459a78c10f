"""Writes the state of a process at step boundaries to a file, for `forge rehearse` to compare.

    FORGE_TRACE="97,98,99 /tmp/…/trace.jsonl"

Used only after a rehearsal has found a difference. At the first boundaries of each process and at
those of the given steps, a line has the fingerprint of each leaf of a checkpoint, of the last
batch, and of each variable of the script.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from forge.checkpoint.format.leaves import leaves
from forge.jobdir.job_files import REHEARSAL
from forge.state.variables import fingerprint, variables
from forge.training.loop.loop_state import LoopState
from forge.training.train_state import TrainState

VARIABLE = "FORGE_TRACE"
NUM_FIRST = 3
"""Number of first boundaries of each process that are always written."""

_batch: list[Any] = []
"""The last batch of this process."""
_num_written = [0]


def is_rehearsed() -> bool:
    """Whether `forge rehearse` started this process."""
    return REHEARSAL in os.environ


def took(batch: Any) -> None:
    """Keep the batch with which a step begins."""
    if VARIABLE in os.environ:
        _batch[:] = [batch]


def arrive(name: str, loops: LoopState, train_state: TrainState) -> None:
    """Trace a step boundary; does nothing unless FORGE_TRACE is set.

    Args:
        name: The name of the `forge.Run`.
        loops: The current step and loop.
        train_state: The state that a checkpoint would contain.
    """
    if VARIABLE not in os.environ:
        return
    steps, file = os.environ[VARIABLE].split(" ", 1)
    if _num_written[0] >= NUM_FIRST and str(loops.step) not in steps.split(","):
        return
    _num_written[0] += 1
    state = {key: one for key, one in train_state.capture().items() if key != "metrics"}
    epoch = [loops.place.epoch, loops.place.phase.name] if loops.place else []
    line = {
        "pid": os.getpid(),
        "place": [name, loops.number, *epoch, loops.step],
        "leaves": {leaf.path: fingerprint(leaf.value) for leaf in leaves(state)},
        "batch": fingerprint(_batch[0]) if _batch else None,
        "variables": list(variables(inspect.currentframe(), train_state.live.given.values())),
    }
    with open(file, "a") as out:
        out.write(json.dumps(line) + "\n")
