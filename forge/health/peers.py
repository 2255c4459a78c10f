"""Checks of the ranks against each other: each of them calls the same one at the same time.

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

from forge.health.check import Context, Finding

_LEFTOVER = ".step_health_"
"""What begins so in a checkpoint directory, the next attempt removes."""
_LOOK_S = 0.1
"""A file system of the network shows a new file to the other nodes within seconds."""


def gathered(context: Context, key: str, value: Any) -> list[Any]:
    """What each rank gives under this key, once an attempt, by rank.

    Raises:
        RankLost: Where one has not given anything within the check's `timeout_s`.
    """
    texts = context.ranks.gather(
        f"health/{key}", json.dumps(value).encode(), context.config.timeout_s
    )
    return [json.loads(text) for text in texts]


def _failed(context: Context, key: str, problem: str) -> tuple[list[int], str]:
    """The ranks that have a problem, and for people who they are and what it is."""
    answers = gathered(context, key, [problem, socket.gethostname()])
    failed = [rank for rank, (one, _) in enumerate(answers) if one]
    named = [f"rank {rank} on {answers[rank][1]} {answers[rank][0]}" for rank in failed[:4]]
    return failed, "; ".join([*named, *([f"{len(failed) - 4} more"] if failed[4:] else [])])


def collective(context: Context) -> Finding | None:
    """Whether an all-reduce comes back right, on the backend that the training uses."""
    size, limit_s = context.ranks.size, context.config.timeout_s
    if size == 1:
        return None
    from forge.resilience.health import check_nccl_health  # it needs torch

    # Together: who comes late for another reason would look like a broken network.
    gathered(context, "before the collective", None)
    problem = "" if check_nccl_health(limit_s) else f"had no right answer within {limit_s:g} s"
    wrong, named = _failed(context, "the collective", problem)
    if not wrong:
        return Finding(f"an all-reduce of {size} ranks came back right")
    return Finding(
        f"in an all-reduce of {size} ranks {named}",
        is_failed=True,
        remedy="Look at the network between these nodes (`NCCL_DEBUG=INFO`,"
        " `TORCH_DISTRIBUTED_DEBUG`).",
        # Where it came back on no rank, nobody knows which of them is to blame.
        culprits=() if len(wrong) == size else tuple(wrong),
    )


def shared_directory(context: Context) -> Finding | None:
    """Whether every rank reads what rank 0 writes into the checkpoint directory."""
    folder, is_first = context.checkpoint_dir, context.ranks.rank == 0
    if context.ranks.size == 1:
        return None
    made = folder / f"{_LEFTOVER}{secrets.token_hex(8)}"
    try:
        problem = _write(made) if is_first else ""
        name = gathered(context, "the shared file", "" if problem else made.name)[0]
        if name and not is_first:
            problem = _problem(context, folder / name)
        blind, named = _failed(context, "the shared file was read", problem)
    finally:
        if is_first:
            with contextlib.suppress(OSError):  # the next attempt removes it
                made.unlink(missing_ok=True)
    if not blind:
        return Finding(f"{context.ranks.size} ranks read what rank 0 has written")
    return Finding(
        f"{folder} does not serve all ranks: {named}",
        is_failed=True,
        remedy="Save to a file system that every node of the job has mounted.",
        culprits=tuple(blind),
    )


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
    """Why it does not hold its name; looks again until half the check's time is over."""
    deadline = time.monotonic() + context.config.timeout_s / 2
    while True:
        try:
            if path.read_text(errors="replace") == path.name:
                return ""
            problem = "reads something else there"
        except OSError as error:
            problem = f"does not see its file: {error}"
        if time.monotonic() >= deadline or context.stopped.wait(_LOOK_S):
            return problem
