"""When a `GradScaler` updates its scale, and which bad gradients its scale explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from forge.errors import ForgeError
from forge.state.registry import StateRegistry
from forge.training.nan.nan_policy import Checked


@dataclass
class _Open:
    """A scaler that has stepped optimizers since its last `update`."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)


class Scaling:
    """Calls `GradScaler.update` once at the end of a step, however many optimizers used it.

    So the gradients of all optimizers in one step have the same scale.

    Args:
        live: The objects of the run.
        note: Writes an event into the ledger.
    """

    def __init__(self, live: StateRegistry, note: Callable[..., None]) -> None:
        self._live = live
        self._note = note
        self._open: dict[Any, _Open] = {}
        self.overflows = Overflows()

    def begin_update(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Call before the gradients of `optimizers` are unscaled.

        Raises:
            ForgeError: If one of them was updated in this step: the scale has to change in between,
                but the gradients of other optimizers can have the old scale.
        """
        opened = self._open.get(scaler, _Open())
        for one in optimizers:
            if one in opened.optimizers:
                raise ForgeError(
                    f"run.update() was called twice in a step for `{self._live.name_of(one)}`,"
                    " with a GradScaler, whose scale changes once in a step: make each of these"
                    " updates in a step of its own, or train in bfloat16 without a scaler."
                )

    def end_update(
        self,
        scaler: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Any] = (),
    ) -> None:
        """`optimizers` were stepped or skipped; `schedules` step if the scaler did not skip."""
        opened = self._open.setdefault(scaler, _Open())
        opened.optimizers += optimizers
        opened.schedules += schedules

    def settle(self) -> None:
        """Update every scale that was used: the step ends, or is saved."""
        for scaler in list(self._open):
            self._move(scaler)

    def _move(self, scaler: Any) -> None:
        opened = self._open.pop(scaler)
        before = scaler.get_scale() if opened.schedules else 0.0
        scaler.update()
        # A lowered scale means that the scaler skipped the step.
        if opened.schedules and scaler.get_scale() >= before:
            for schedule in opened.schedules:
                schedule.step()

    def is_own(
        self, scaler: Any, key: str, checked: Checked, step: int, *, has_to_fall: bool
    ) -> tuple[bool, str]:
        """Whether the scaler made the gradients bad; and the explained problem.

        Args:
            key: Names the scaler, and its optimizers.
            has_to_fall: See `Overflows.explain`.
        """
        scale, problem = float(scaler.get_scale()), checked.problem
        if not problem:
            self.overflows.good(key, scale)
            return False, ""
        against = self.overflows.explain(key, scale, has_to_fall=has_to_fall)
        if checked.is_loss_bad:  # the loss is checked before it is scaled
            return False, problem
        if against:
            return False, f"{problem}, though {against}"
        self.overflows.total += 1
        self._note("overflow", step=step, scale=scale, total=self.overflows.total)
        return True, problem


_FALL = 2.0**4
"""Largest fall of a scale between two good updates: the scaler probes, and data differ."""
_FIRST_FALL = 2.0**16
"""Largest fall before the first good update: the initial scale is too high by design."""


@dataclass
class _Fall:
    """How far a scale has fallen since the last good update."""

    top: float
    """The scale of the last good update or of the first bad one since, whichever is lower."""
    has_updated: bool
    """Whether there was a good update."""
    num_bad: int = 0
    """Number of bad updates since then."""
    last: float = math.inf
    """The scale of the last bad update."""


class Overflows:
    """Distinguishes overflows caused by a scaler from gradients that are bad at any scale.

    A scaler searches for the largest scale without overflow, so it causes a bad gradient now and
    then; it then lowers the scale, and the next gradient is good. If gradients stay bad while the
    scale falls further and further, the model is the cause.
    """

    def __init__(self) -> None:
        self._falls: dict[str, _Fall] = {}
        self.total = 0
        """Updates that were skipped for overflows caused by a scaler."""

    def good(self, key: str, scale: float) -> None:
        """The gradients of `key` were good with this scale."""
        self._falls[key] = _Fall(scale, has_updated=True)

    def explain(self, key: str, scale: float, *, has_to_fall: bool) -> str:
        """The gradients of `key`, or their loss, are bad with this scale.

        Args:
            has_to_fall: Whether the scale must fall after each bad update: a scale that stays
                is at its lower limit, and no longer explains bad gradients.
        Returns:
            Why the scaler is not the cause; empty if it can be.
        """
        fall = self._falls.setdefault(key, _Fall(scale, has_updated=False))
        if not fall.num_bad:
            fall.top = min(fall.top, scale)
        is_stuck = has_to_fall and scale >= fall.last
        fall.num_bad, fall.last = fall.num_bad + 1, scale
        most = _FALL if fall.has_updated else _FIRST_FALL
        if is_stuck:
            return f"the GradScaler's scale stays at {scale:g}"
        if fall.top > scale * most:
            since = "since the last good update" if fall.has_updated else "without a good update"
            return f"the GradScaler's scale has fallen from {fall.top:g} to {scale:g} {since}"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, so that a resumed run judges in the same way."""
        return {"total": self.total, "falls": {k: asdict(one) for k, one in self._falls.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values from a checkpoint."""
        self.total = state["total"]
        self._falls = {key: _Fall(**one) for key, one in state["falls"].items()}
