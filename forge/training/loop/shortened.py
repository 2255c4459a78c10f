"""How `forge rehearse` shortens a training: what a resume loses shows in a few steps.

    FORGE_REHEARSED_STEPS=60

A loop ends after so many steps (a second one after twice as many), a pass after a third of them,
and periodic saves and functions of `run.every` come so often that each is seen.
"""

from __future__ import annotations

import os

from forge.config.schema import Policy

VARIABLE = "FORGE_REHEARSED_STEPS"
_PASSES = 3
_SAVES = 6


def _steps() -> int:
    """0: nothing is shortened."""
    return int(os.environ.get(VARIABLE, 0))


def loop(n: float, number: int) -> float:
    """Steps after which the loop of this number ends, of `n`."""
    return min(n, (number + 1) * _steps()) if _steps() else n


def is_over(epoch: int, step: int) -> bool:
    """Whether no epoch follows so many, with so many steps."""
    return 0 < _steps() <= step and epoch >= 2


def is_pass_over(taken: int) -> bool:
    """Whether a pass ends after so many batches."""
    return 0 < _interval(_PASSES) <= taken


def every(steps: int | None) -> int | None:
    """Steps from one evaluation to the next, of `steps`."""
    return min(steps, _interval(_PASSES)) if steps and _steps() else steps


def every_epochs(epochs: int | None) -> int | None:
    """Of `epochs`: there may be but two."""
    return 1 if epochs and _steps() else epochs


def adapt(policy: Policy) -> None:
    """Let it save often enough."""
    if _steps():
        wanted = policy.checkpoint.every_steps or _steps()
        policy.checkpoint.every_steps = min(wanted, _interval(_SAVES))


def _interval(times: int) -> int:
    return -(-_steps() // times)
