"""What a process holds at step boundaries, written down for `forge rehearse` to compare.

    FORGE_TRACE="/tmp/…/trace.jsonl 97 98 99"

Only where a rehearsal has found a difference: at the first boundaries of each process and at those
of the steps named, a line with the fingerprint of each leaf of a checkpoint, of the batch before
it, and of each variable of the script.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

from forge.checkpoint.format.leaves import leaves
from forge.state.variables import fingerprint, variables

VARIABLE = "FORGE_TRACE"
NUM_FIRST = 3
"""Boundaries of each process that are written at any rate."""

_batch: list[Any] = []
"""The last one, of this process."""
_num_written = [0]


def took(batch: Any) -> None:
    """A step begins with this batch."""
    if VARIABLE in os.environ:
        _batch[:] = [batch]


def arrive(
    place: list[Any], step: int, capture: Callable[[], Any], known: Collection[object]
) -> None:
    """This process has come to a step boundary; nothing happens where nobody traces.

    Args:
        place: What tells this boundary from others after as many steps.
        step: Steps done.
        capture: Gives what a checkpoint would hold.
        known: The objects that were given to `forge.Run`.
    """
    if VARIABLE not in os.environ:
        return
    file, *steps = os.environ[VARIABLE].split(" ")
    if _num_written[0] >= NUM_FIRST and str(step) not in steps:
        return
    _num_written[0] += 1
    state = {key: one for key, one in capture().items() if key != "metrics"}
    line = {
        "pid": os.getpid(),
        "place": [*place, step],
        "leaves": {leaf.path: fingerprint(leaf.value) for leaf in leaves(state)},
        "batch": fingerprint(_batch[0]) if _batch else None,
        "variables": list(variables(sys._getframe(1), known)),
    }
    with open(file, "a") as out:
        out.write(json.dumps(line) + "\n")
