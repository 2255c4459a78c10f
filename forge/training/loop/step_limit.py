"""Shortens a training for `forge rehearse`: a few steps show whether a resume loses anything.

    FORGE_REHEARSED_STEPS=60

The loop ends after that many steps (a second loop after twice as many), a pass after a third of
them. Periodic saves and functions of `run.every` are made frequent enough to happen several times.
"""

from __future__ import annotations

import math
import os

from forge.config.schema import Policy

VARIABLE = "FORGE_REHEARSED_STEPS"
_PASSES = 3
_SAVES = 6


def _steps() -> int:
    """Steps to shorten to; 0: not shortened."""
    return int(os.environ.get(VARIABLE, 0))


def loop(n: float, number: int) -> float:
    """Steps after which loop `number` ends, instead of `n`."""
    return min(n, (number + 1) * _steps()) if _steps() else n


def is_over(epoch: int, step: int) -> bool:
    """Whether the loop over epochs ends, after so many epochs and steps."""
    return 0 < _steps() <= step and epoch >= 2


def longest_pass() -> float:
    """Batches after which a pass ends, unless its loader has ended before."""
    return _interval(_PASSES) or math.inf


def every(steps: int | None) -> int | None:
    """The interval between evaluations, in steps, instead of `steps`."""
    return min(steps, _interval(_PASSES)) if steps and _steps() else steps


def every_epochs(epochs: int | None) -> int | None:
    """The interval between evaluations, in epochs: there can be as few as two epochs."""
    return 1 if epochs and _steps() else epochs


def adapt(policy: Policy) -> None:
    """Make the policy save often enough."""
    if _steps():
        wanted = policy.checkpoint.every_steps or _steps()
        policy.checkpoint.every_steps = min(wanted, _interval(_SAVES))


def _interval(times: int) -> int:
    return -(-_steps() // times)
