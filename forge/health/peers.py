"""Checks of the ranks against each other: each of them calls the same one at the same time.

Values travel through the store in which the ranks have met, never by a collective, so that a rank
that does not come is missed within the check's own limit, and nothing is left half done.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from forge.errors import RankLost
from forge.health.check import Context, Finding

_LEFTOVER = ".step_health_"
"""What begins so in a checkpoint directory, the next attempt removes."""
_ELSEWHERE = "Save to a file system that every node of the job has mounted."
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


def collective(context: Context) -> Finding | None:
    """Whether an all-reduce comes back right, on the backend that the training uses."""
    if context.ranks.size == 1:
        return None
    from forge.resilience.health import check_nccl_health  # it needs torch

    remedy = (
        "Look at the network between these nodes (`NCCL_DEBUG=INFO`, `TORCH_DISTRIBUTED_DEBUG`)."
    )
    try:
        # Together: who comes late for another reason would look like a broken network.
        gathered(context, "before the collective", None)
        is_right = check_nccl_health(context.config.timeout_s)
        answers = gathered(context, "the collective", [is_right, socket.gethostname()])
    except RankLost as lost:
        return Finding(str(lost), is_failed=True, remedy=remedy, culprits=())
    wrong = [rank for rank, (one, _) in enumerate(answers) if not one]
    if not wrong:
        return Finding(f"an all-reduce of {len(answers)} ranks came back right")
    named = ", ".join(f"{rank} ({answers[rank][1]})" for rank in wrong[:8])
    # Where it came back on no rank, nobody knows which of them is to blame.
    culprits = () if len(wrong) == len(answers) else tuple(wrong)
    text = (
        f"an all-reduce did not come back right within {context.config.timeout_s:g} s on rank"
        f" {named} of {len(answers)}"
    )
    return Finding(text, is_failed=True, remedy=remedy, culprits=culprits)


def shared_directory(context: Context) -> Finding | None:
    """Whether every rank reads what rank 0 writes into the checkpoint directory."""
    if context.ranks.size == 1:
        return None
    made, error = _written(context.checkpoint_dir) if context.ranks.rank == 0 else ("", "")
    try:
        name, error = gathered(context, "the shared file", [made, error])[0]
        problem = "" if error else _problem(context, context.checkpoint_dir / name, name)
        answers = gathered(context, "the shared file was read", [problem, socket.gethostname()])
    except RankLost as lost:
        return _nobody_came(lost)
    finally:
        if made:
            (context.checkpoint_dir / made).unlink(missing_ok=True)
    if error:
        text = f"rank 0 cannot write to {context.checkpoint_dir}: {error}"
        return Finding(text, is_failed=True, remedy=_ELSEWHERE, culprits=(0,))
    blind = [rank for rank, (one, _) in enumerate(answers) if one]
    if not blind:
        return Finding(f"{len(answers)} ranks read what rank 0 has written")
    named = "; ".join(
        f"rank {rank} on {answers[rank][1]}: {answers[rank][0]}" for rank in blind[:4]
    )
    return Finding(
        f"{context.checkpoint_dir} is not the same for all ranks: {named}",
        is_failed=True,
        remedy=_ELSEWHERE,
        culprits=tuple(blind),
    )


def _nobody_came(lost: RankLost) -> Finding:
    """Whoever does not come: it is not known why, nor whose node is to blame."""
    remedy = "Look at what that rank waits for, or raise the check's `timeout_s`."
    return Finding(str(lost), is_failed=True, remedy=remedy, culprits=())


def _written(folder: Path) -> tuple[str, str]:
    """(the name of a new file that holds its own name, why there is none)."""
    name = f"{_LEFTOVER}{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "x") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return "", str(error)
    return name, ""


def _problem(context: Context, path: Path, expected: str) -> str:
    """Why it does not hold that; looks again until half the check's time is over."""
    deadline = time.monotonic() + context.config.timeout_s / 2
    while True:
        try:
            found = path.read_text(errors="replace")
            problem = "" if found == expected else "has another content there"
        except OSError as error:
            problem = str(error)
        if not problem or time.monotonic() >= deadline or context.stopped.wait(_LOOK_S):
            return problem


def clock_skew(context: Context) -> Finding:
    """Whether the clocks of the ranks agree, and with that of the file system."""
    file_s = _ahead_of_files_s(context.checkpoint_dir) if context.is_first_of_node else 0.0
    own = {"node": socket.gethostname(), "file_s": file_s}
    try:
        gathered(context, "before the clocks", None)
        # All ranks come out of the line above within a twentieth of a second.
        found = gathered(context, "the clocks", own | {"clock": time.time()})
    except RankLost as lost:
        return _nobody_came(lost)
    return skew_between(found, context.threshold)


def skew_between(found: list[dict[str, Any]], threshold_s: float) -> Finding:
    """What clocks that were read at the same moment say.

    Args:
        found: Of each rank its `node`, `clock` (unix time) and `file_s`: how far it is ahead of the
            file system's; 0 where that is unknown.
        threshold_s: How far they may be apart.
    """
    clocks = [one["clock"] for one in found]
    middle = statistics.median(clocks)
    spread_s = max(clocks) - min(clocks)
    file_s = max((one["file_s"] for one in found), key=abs)
    value = f"the clocks of {len(found)} ranks are {spread_s:.1f} s apart" if found[1:] else ""
    # Of two that differ, the one that the file system contradicts is wrong.
    far = max(
        range(len(found)),
        key=lambda rank: (
            round(abs(found[rank]["clock"] - middle), 1),
            abs(found[rank]["file_s"]),
            rank,
        ),
    )
    culprits: tuple[int, ...] | None = () if found[1:] else None
    if spread_s > threshold_s:
        ahead_s = found[far]["clock"] - middle
        side = "ahead of" if ahead_s > 0 else "behind"
        value += f": rank {far} on {found[far]['node']} is {abs(ahead_s):.1f} s {side} the median"
        culprits = (far,)
    value += f"{', ' if value else ''}{abs(file_s):.1f} s from the clock of the file system"
    return Finding(
        value,
        is_failed=max(spread_s, abs(file_s)) > threshold_s,
        remedy="Have the clocks synchronised (`chronyc tracking`, `timedatectl`).",
        culprits=culprits,
    )


def _ahead_of_files_s(folder: Path) -> float:
    """How far this clock is ahead of the one that stamps files there; 0 where nobody says."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_LEFTOVER) as file:
            before = time.time()
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())  # the server's clock, where it is a server
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError:  # `disk` says so
        return 0.0
    return max(before - stamp, 0.0) + min(after - stamp, 0.0)
