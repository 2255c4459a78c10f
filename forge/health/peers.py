"""The check of the ranks against each other: each of them makes it at the same time.

Values travel through the store in which the ranks have met, never by a collective, so that a rank
that does not come is missed within the limit of the check, and nothing is left half done. `make`
takes that for a failure, and of nobody's node.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from forge.health.check import TIMEOUT_S, Context, Finding

_LEFTOVER = ".step_health_"
"""What begins so in a checkpoint directory, the next attempt removes."""
_VISIBLE_S = TIMEOUT_S / 2
"""Seconds in which a file system of the network has to show a new file to the other nodes."""
_LOOK_S = 0.1


def ranks(context: Context) -> Finding | None:
    """Whether all ranks read the same directory, and an all-reduce comes back right.

    The all-reduce is on the backend that the training uses; the first one of NCCL takes tens of
    seconds on many nodes.
    """
    size = context.ranks.size
    if size == 1:
        return None
    from forge.health.devices import check_nccl_health  # it needs torch

    # All ranks come out of this at the same time: one that came late to the all-reduce for another
    # reason would look like a broken network.
    blind, named = _blind(context)
    if blind:
        return Finding(
            f"{context.checkpoint_dir} does not serve all ranks: {named}",
            is_failed=True,
            remedy="Save to a file system that every node of the job has mounted.",
            culprits=tuple(blind),
        )
    is_right = check_nccl_health(TIMEOUT_S)
    problem = "" if is_right else f"did not get the right sum within {TIMEOUT_S:g} s"
    wrong, named = _failed(context, "the collective", problem)
    if not wrong:
        return Finding(
            f"{size} ranks read the same directory, and an all-reduce returned the right sum"
        )
    return Finding(
        f"in an all-reduce of {size} ranks {named}",
        is_failed=True,
        remedy="Check the network between these nodes (`NCCL_DEBUG=INFO`,"
        " `TORCH_DISTRIBUTED_DEBUG`).",
        # If it came back on no rank, nobody knows which of them is to blame.
        culprits=() if len(wrong) == size else tuple(wrong),
    )


def gathered(context: Context, key: str, value: Any) -> list[Any]:
    """What each rank gives under this key, once an attempt, by rank.

    Raises:
        RankLost: If one has not given anything in time.
    """
    texts = context.ranks.gather(f"health/{key}", json.dumps(value).encode(), TIMEOUT_S)
    return [json.loads(text) for text in texts]


def _failed(context: Context, key: str, problem: str) -> tuple[list[int], str]:
    """The ranks that have a problem, and for people who they are and what it is."""
    answers = gathered(context, key, [problem, socket.gethostname()])
    failed = [rank for rank, (one, _) in enumerate(answers) if one]
    named = [f"rank {rank} on {answers[rank][1]} {answers[rank][0]}" for rank in failed[:4]]
    return failed, "; ".join([*named, *([f"{len(failed) - 4} more"] if failed[4:] else [])])


def _blind(context: Context) -> tuple[list[int], str]:
    """The ranks that do not read what rank 0 writes into the checkpoint directory, as `_failed`."""
    folder, is_first = context.checkpoint_dir, context.ranks.rank == 0
    made = folder / f"{_LEFTOVER}{secrets.token_hex(8)}"
    try:
        problem = _write(made) if is_first else ""
        name = gathered(context, "the shared file", "" if problem else made.name)[0]
        if name and not is_first:
            problem = _problem(context, folder / name)
        return _failed(context, "the shared file was read", problem)
    finally:
        if is_first:
            with contextlib.suppress(OSError):  # the next attempt removes it
                made.unlink(missing_ok=True)


def _write(path: Path) -> str:
    """Make a file that holds its own name; why there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x") as file:
            file.write(path.name)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"cannot write there: {error}"
    return ""


def _problem(context: Context, path: Path) -> str:
    """Why it does not hold its name; looks again until its time is over."""
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            if path.read_text(errors="replace") == path.name:
                return ""
            problem = "reads something else there"
        except OSError as error:
            problem = f"does not see its file: {error}"
        if time.monotonic() >= deadline or context.stopped.wait(_LOOK_S):
            return problem
