"""Writes the state of a process at step boundaries to a file, for `forge rehearse` to compare.

    FORGE_TRACE="97,98,99 /tmp/…/trace.jsonl"

At the first boundaries of each process and at those of the given steps, a line has the fingerprint
of each leaf of a checkpoint, of the last batch, and of each variable of the script. With "stops" in
place of the steps, the boundary at which a process is stopped has one, too.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from forge.checkpoint.format.leaves import leaves
from forge.group.requests import Watcher
from forge.state.variables import fingerprint, variables
from forge.training.loop.loop_progress import LoopProgress
from forge.training.train_state import TrainState

VARIABLE = "FORGE_TRACE"
AT_STOPS = "stops"
NUM_FIRST = 3
"""Number of first boundaries of each process that are always written."""

_num_written = [0]


class TraceRecorder(Watcher):
    """Traces step boundaries.

    Args:
        name: The name of the `forge.Run`.
        loops: The current step and loop.
        train_state: The state that a checkpoint would contain.
        rank: Rank 0 writes; all ranks read the state, as a `state_dict` can contain a collective.
    """

    def __init__(self, name: str, loops: LoopProgress, train_state: TrainState, rank: int) -> None:
        self._name = name
        self._loops = loops
        self._train_state = train_state
        self._rank = rank
        self._batch: list[Any] = []
        """The last batch."""

    def on_batch(self, batch: Any) -> None:
        """Keep the batch with which a step begins."""
        self._batch = [batch]

    def on_boundary(self, step: int) -> None:
        """Write a line, if this is one of the boundaries to trace."""
        steps, _ = _options()
        if _num_written[0] < NUM_FIRST or str(self._loops.step) in steps.split(","):
            _num_written[0] += 1
            self._write()

    def on_stop(self) -> None:
        """Write a line, with what the next process has to restore."""
        if _options()[0] == AT_STOPS:
            self._write()

    def _write(self) -> None:
        loops = self._loops
        state = {key: one for key, one in self._train_state.capture().items() if key != "metrics"}
        if self._rank:
            return
        epoch = [loops.epochs.epoch, loops.epochs.phase.name] if loops.epochs else []
        given = self._train_state.live.given.values()
        line = {
            "pid": os.getpid(),
            "place": [self._name, loops.number, *epoch, loops.step],
            "leaves": {leaf.path: _fingerprint(leaf.value) for leaf in leaves(state)},
            "batch": _fingerprint(self._batch[0]) if self._batch else None,
            "variables": list(variables(inspect.currentframe(), given)),
        }
        with open(_options()[1], "a") as out:
            out.write(json.dumps(line) + "\n")


def _fingerprint(value: Any) -> str:
    """The fingerprint of a leaf; of one without data here (a shard, a tensor on meta) its type."""
    try:
        return fingerprint(value)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return type(value).__name__


def _options() -> list[str]:
    """The steps to trace, and the file."""
    return os.environ[VARIABLE].split(" ", 1)
