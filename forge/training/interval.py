"""`checkpoint.every_s: auto`: the time between two saves that loses least to saving and to failing.

It is computed once a start, from the saves and the losses of the attempts before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_S, MOST_S = 10.0, 3600.0
"""Bounds of the interval, in seconds."""
PRIOR_S = 8 * 3600.0
"""Seconds of training without a loss that are assumed before the first one: then the mean time
between losses is known from the start, and a job that trains for days without one trusts its node
more and more."""
FACTOR = 2.0
"""The interval becomes at most this many times longer or shorter from one start to the next."""
NUM_SAVES = 5
"""The last saves, whose median cost counts: a single slow save says little."""


def mtbf_s(trained_s: float, num_losses: int) -> float:
    """Mean seconds of training between two losses.

    Args:
        trained_s: Seconds that all attempts of the job have trained.
        num_losses: Attempts that ended without a save, by a kill, a lost node or a hang.
    """
    return (PRIOR_S + trained_s) / (1 + num_losses)


def interval_s(
    costs_s: Sequence[float],
    trained_s: float,
    num_losses: int,
    before_s: float | None = None,
) -> float:
    """Seconds from one save to the next.

    Args:
        costs_s: Seconds that each save, the last ones, has blocked training or would block it.
        trained_s: Seconds that all attempts of the job have trained.
        num_losses: Attempts that ended without a save, by a kill, a lost node or a hang.
        before_s: The interval of the last start; None at the first.
    Source: Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016.
    """
    cost_s = max(statistics.median(costs_s[-NUM_SAVES:]), 1e-3)
    best_s = math.sqrt(2 * cost_s * mtbf_s(trained_s, num_losses))
    if before_s is not None:
        best_s = min(max(best_s, before_s / FACTOR), before_s * FACTOR)
    return min(max(best_s, LEAST_S), MOST_S)
