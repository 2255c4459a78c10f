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
from forge.group.watcher import Watcher
from forge.state.variables import fingerprint, variables
from forge.training.loop.loop_progress import LoopProgress
from forge.training.train_state import TrainState

VARIABLE = "FORGE_TRACE"
NUM_FIRST = 3
"""Number of first boundaries of each process that are always written."""

_num_written = [0]


class TraceRecorder(Watcher):
    """Traces step boundaries.

    Args:
        name: The name of the `forge.Run`.
        loops: The current step and loop.
        train_state: The state that a checkpoint would contain.
    """

    def __init__(self, name: str, loops: LoopProgress, train_state: TrainState) -> None:
        self._name = name
        self._loops = loops
        self._train_state = train_state
        self._batch: list[Any] = []
        """The last batch."""

    def on_batch(self, batch: Any) -> None:
        """Keep the batch with which a step begins."""
        self._batch = [batch]

    def on_boundary(self, step: int) -> None:
        """Write a line, if this is one of the boundaries to trace."""
        loops = self._loops
        steps, file = os.environ[VARIABLE].split(" ", 1)
        if _num_written[0] >= NUM_FIRST and str(loops.step) not in steps.split(","):
            return
        _num_written[0] += 1
        state = {key: one for key, one in self._train_state.capture().items() if key != "metrics"}
        epoch = [loops.epochs.epoch, loops.epochs.phase.name] if loops.epochs else []
        given = self._train_state.live.given.values()
        line = {
            "pid": os.getpid(),
            "place": [self._name, loops.number, *epoch, loops.step],
            "leaves": {leaf.path: fingerprint(leaf.value) for leaf in leaves(state)},
            "batch": fingerprint(self._batch[0]) if self._batch else None,
            "variables": list(variables(inspect.currentframe(), given)),
        }
        with open(file, "a") as out:
            out.write(json.dumps(line) + "\n")
