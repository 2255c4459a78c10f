"""The health check `ranks`, which all ranks run together, at the same time.

The ranks exchange values through the store of their rendezvous, not by collectives: if a rank does
not join, the others time out within the limit of the check, and no collective stays unfinished.
`make` counts the timeout as a failure, but blames no node.
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
"""Prefix of files in a checkpoint directory that the next attempt removes."""
_VISIBLE_S = TIMEOUT_S / 2
"""Seconds in which a network file system has to show a new file to the other nodes."""
_LOOK_S = 0.1


def ranks(context: Context) -> Finding | None:
    """Whether all ranks read the same directory, and an all-reduce returns the correct sum.

    The all-reduce uses the training's backend; the first one of NCCL takes tens of
    seconds on many nodes.
    """
    size = context.ranks.size
    if size == 1:
        return None
    from forge.health.devices import check_nccl_health  # it needs torch

    # This also synchronises the ranks: a rank that is late for the all-reduce for another reason
    # would look like a broken network.
    blind, named = _blind(context)
    if blind:
        return Finding(
            f"not all ranks share {context.checkpoint_dir}: {named}",
            is_failed=True,
            remedy="Save to a file system that every node of the job mounts.",
            culprits=tuple(blind),
        )
    is_right = check_nccl_health(TIMEOUT_S)
    problem = "" if is_right else f"did not get the correct sum within {TIMEOUT_S:g} s"
    wrong, named = _failed(context, "the collective", problem)
    if not wrong:
        return Finding(
            f"{size} ranks read the same directory, and an all-reduce returned the correct sum"
        )
    return Finding(
        f"in an all-reduce of {size} ranks {named}",
        is_failed=True,
        remedy="Check the network between these nodes (`NCCL_DEBUG=INFO`,"
        " `TORCH_DISTRIBUTED_DEBUG`).",
        # If it failed on every rank, the culprit is unknown.
        culprits=() if len(wrong) == size else tuple(wrong),
    )


def gathered(context: Context, key: str, value: Any) -> list[Any]:
    """All-gather a value under this key, once per attempt; the list is in order of ranks.

    Raises:
        RankLost: If a rank does not send its value in time.
    """
    texts = context.ranks.gather(f"health/{key}", json.dumps(value).encode(), TIMEOUT_S)
    return [json.loads(text) for text in texts]


def _failed(context: Context, key: str, problem: str) -> tuple[list[int], str]:
    """The ranks that have a problem, and a text for people with their nodes and problems."""
    answers = gathered(context, key, [problem, socket.gethostname()])
    failed = [rank for rank, (one, _) in enumerate(answers) if one]
    named = [f"rank {rank} on {answers[rank][1]} {answers[rank][0]}" for rank in failed[:4]]
    return failed, "; ".join([*named, *([f"{len(failed) - 4} more"] if failed[4:] else [])])


def _blind(context: Context) -> tuple[list[int], str]:
    """As `_failed`, for ranks that do not see a file of rank 0 in the checkpoint directory."""
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
    """Write a file that contains its own name; returns the problem, if any."""
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
    """Why the file cannot be read correctly; retries until a timeout."""
    deadline = time.monotonic() + _VISIBLE_S
    while True:
        try:
            if path.read_text(errors="replace") == path.name:
                return ""
            problem = "reads other content in the file of rank 0"
        except OSError as error:
            problem = f"does not see the file of rank 0: {error}"
        if time.monotonic() >= deadline or context.stopped.wait(_LOOK_S):
            return problem
