"""Which signals a run gets, and at which steps: drawn from a seed."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from forge.errors import ExitCode

STOPS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
"""Signals at which a script can save."""
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGKILL")
"""Default of --signals."""


@dataclass(frozen=True)
class Strike:
    """A signal at a step boundary, or within the step that follows the boundary."""

    name: str
    count: int
    """The signal is sent at the boundary of this number, counted from 1 in the process."""
    fraction: float
    """Fraction of a step after that boundary."""

    def ends_with(self, code: int | None) -> bool:
        """Whether a process that got this signal ends with this code, within `forge.Run` or not."""
        died = -int(signal.Signals[self.name])
        return code == died or (self.name != "SIGKILL" and code in (ExitCode.REQUEUE, 128 - died))


def plan(num_steps: int, seed: int, signals: Sequence[str] = SIGNALS) -> list[Strike]:
    """Two signals, at step boundaries or soon after: a stop and a kill, in either order.

    Two of the same kind if `signals` has only one kind.
    """
    rng = random.Random(seed)
    places = sorted(rng.sample(range(1, num_steps + 1), min(2, num_steps)))
    stops = [one for one in signals if one in STOPS]
    first = rng.choice(stops) if stops else "SIGKILL"
    second = "SIGKILL" if "SIGKILL" in signals else rng.choice(stops)
    names = rng.sample([first, second], 2)
    found, before = [], 0
    for name, place in zip(names, places, strict=False):
        fraction = rng.choice([0.0, round(rng.uniform(0, 0.99), 2)])
        if place == num_steps:  # no boundary follows: it would be chance which came first, the end
            fraction = 0.0
        found.append(Strike(name, place - before + 1, fraction))
        # Where it resumes: a stop within a step comes to the end of that step.
        before = place + 1 if name in STOPS and fraction > 0 else place
    return found


def signals_of(text: str) -> list[str]:
    """The names in a list like `TERM,KILL`.

    Raises:
        ValueError: If one of them is not a signal that a run can get.
    """
    names = [f"SIG{one.strip().upper().removeprefix('SIG')}" for one in text.split(",")]
    if not set(names) <= {*STOPS, "SIGKILL"}:
        raise ValueError(text)
    return names
