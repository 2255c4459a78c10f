"""The time between two saves that loses least to saving and to failing (`every_s: auto`).

It is computed once a start, from the saves and the losses of the attempts before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forge.errors import Reason
from forge.jobdir import jsonl, ledger_writer
from forge.jobdir.jsonl import Event

LEAST_S, MOST_S = 10.0, 3600.0
"""Bounds of the interval, in seconds."""
PRIOR_S = 8 * 3600.0
"""Seconds of training that are assumed before the first loss. So there is an estimate from the
start, and a job that trains for days without a loss saves less and less often."""
FACTOR = 2.0
"""The interval becomes at most this many times longer or shorter from one start to the next."""
NUM_SAVES = 5
"""The last saves, whose median cost counts: a single slow save says little."""
_ENDS = ("stop", "halt", "finish", "error")
_SUMMARY = b'"summary": {'


class Interval(NamedTuple):
    """The seconds between two periodic saves, and how they were computed."""

    every_s: float | None
    """None: none are saved by time."""
    cost_s: float = 0.0
    """Median seconds for which the last saves have stopped training, or an estimate."""
    trained_s: float = 0.0
    """Seconds that earlier attempts have trained."""
    num_losses: int = 0
    """Attempts that ended without a save, by a kill, a lost node or a hang."""
    is_auto: bool = False
    """Whether it was computed; else it is the policy's, and the numbers above mean nothing."""

    def __str__(self) -> str:
        if not self.is_auto or self.every_s is None:
            return "never" if self.every_s is None else f"every {self.every_s:g} s"
        losses = "1 loss" if self.num_losses == 1 else f"{self.num_losses} losses"
        return (
            f"every {self.every_s:.0f} s (auto: a save costs {self.cost_s:.2g} s, {losses} in"
            f" {self.trained_s / 3600:.1f} h)"
        )


def mtbf_s(trained_s: float, num_losses: int) -> float:
    """Mean seconds of training between two losses."""
    return (PRIOR_S + trained_s) / (1 + num_losses)


def interval_s(
    cost_s: float, trained_s: float, num_losses: int, before_s: float | None = None
) -> float:
    """Seconds from one save to the next.

    Args:
        cost_s: Seconds for which a save stops training.
        trained_s: Seconds that all attempts of the job have trained.
        num_losses: Attempts that ended without a save, by a kill, a lost node or a hang.
        before_s: The interval of the last start; None at the first.
    Source: Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016.
    """
    best_s = math.sqrt(2 * max(cost_s, 1e-3) * mtbf_s(trained_s, num_losses))
    if before_s is not None:
        best_s = min(max(best_s, before_s / FACTOR), before_s * FACTOR)
    return min(max(best_s, LEAST_S), MOST_S)


def decide(job_dir: Path, run: str, estimate_s: float) -> Interval:
    """The interval of this start, from the ledger of the earlier attempts of a Run.

    Args:
        job_dir: The job's directory.
        run: The Run, as the first event of its ledgers names it.
        estimate_s: Estimated seconds of a save, if none was measured.
    """
    waits: Sequence[float] = ()
    trained_s, num_losses, before_s = 0.0, 0, None
    for _, path in ledger_writer.attempt_files(job_dir):
        head = list(jsonl.head(path))
        start = next((one for one in head if one["kind"] == "start"), None)
        if start is None or head[0].get("checkpoints") != run:
            continue
        last, _ = jsonl.tail(path, _SUMMARY)
        trained_s += max(float(last[-1]["t"]) - float(start["t"]), 0.0)
        num_losses += _is_loss(last)
        waits = next((one["waits"] for one in reversed(last) if "waits" in one), waits)
        before_s = (start.get("interval") or {}).get("every_s") or before_s
    cost_s = statistics.median(waits) if waits else estimate_s
    every_s = interval_s(cost_s, trained_s, num_losses, before_s)
    rounded = round(every_s, 1), round(cost_s, 4), round(trained_s, 1)
    return Interval(*rounded, num_losses, is_auto=True)


def _is_loss(last: Sequence[Event]) -> bool:
    """Whether an attempt was lost, by its last events; a loss has nothing to do with the user.

    An end inside a save says more about the disk or the deadline than about the node.
    """
    end = next((one for one in last if one["kind"] in _ENDS), None)
    if end is not None:
        return bool(end.get("reason") in (Reason.rank_lost.name, Reason.hung.name))
    saves = [one["kind"] for one in last if one["kind"] in ("saving", "save", "save_failed")]
    return not saves or saves[-1] != "saving"
