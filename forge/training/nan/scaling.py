"""When a `GradScaler` moves its scale, and which bad gradients that move explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from forge.state.registry import StateRegistry


@dataclass
class _Open:
    """A scaler that has stepped optimizers since its scale was last moved."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)


class Scaling:
    """Calls `GradScaler.update` as a step of the loop ends, however many optimizers used the scale.

    So gradients of all of them that were made in one step carry one scale.
    """

    def __init__(self, live: StateRegistry) -> None:
        self._live = live
        self._open: dict[Any, _Open] = {}

    def begin(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Before the gradients of `optimizers` are unscaled.

        Where one is updated again in the same step (a GAN's critic), the scale moves first, and
        gradients that were made with the old one are changed to carry the new one: usually by a
        power of two, which costs no bit.
        """
        opened = self._open.get(scaler)
        if opened is None or not any(one in opened.optimizers for one in optimizers):
            return
        before = scaler.get_scale()
        self._move(scaler)
        groups = [g for o in (*optimizers, *self._live.optimizers) for g in o.param_groups]
        gradients = {id(p): p.grad for group in groups for p in group["params"]}
        factor = scaler.get_scale() / before
        for gradient in gradients.values():
            if gradient is not None:
                gradient.mul_(factor)

    def end(
        self,
        scaler: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Any] = (),
    ) -> None:
        """`optimizers` were stepped, or not to be; `schedules` step where the scaler let them."""
        opened = self._open.setdefault(scaler, _Open())
        opened.optimizers += optimizers
        opened.schedules += schedules

    def settle(self) -> None:
        """Move every scale that was used: the step ends, or is saved."""
        for scaler in list(self._open):
            self._move(scaler)

    def _move(self, scaler: Any) -> None:
        opened = self._open.pop(scaler)
        before = scaler.get_scale() if opened.schedules else 0.0
        scaler.update()
        # A lowered scale is the scaler's word that it skipped the step.
        if opened.schedules and scaler.get_scale() >= before:
            for schedule in opened.schedules:
                schedule.step()


_FALL = 2.0**4
"""By how much a scale may fall from one good update to the next: it probes, and data differ."""
_FIRST_FALL = 2.0**16
"""By how much it may fall before the first good update: it starts too high by design."""
_NUM_QUIET = 4
"""Falls before the first good update that are not logged."""


@dataclass
class _Fall:
    """How far a scale has fallen since the last good update with it."""

    top: float
    """The scale of that update, or of the first bad one since: the lower of the two."""
    has_updated: bool
    """Whether there was a good update."""
    num_bad: int = 0
    """Bad updates since."""
    last: float = math.inf
    """The scale of the last of them."""


class Overflows:
    """Tells overflows that a scaler brings about from gradients that are bad at any scale.

    A scaler looks for the largest scale without overflow, so that a bad gradient now and then is
    its own doing. It lowers the scale, and the next one is good. A gradient that stays bad while
    the scale falls and falls is the model's.
    """

    def __init__(self) -> None:
        self._falls: dict[str, _Fall] = {}
        self.total = 0
        """Updates that were left out for overflows of a scaler's own."""

    def good(self, key: str, scale: float) -> None:
        """The gradients that `key` stands for were good with this scale."""
        self._falls[key] = _Fall(scale, has_updated=True)

    def explain(self, key: str, scale: float, *, has_to_fall: bool) -> str:
        """The gradients that `key` stands for, or their loss, are bad with this scale.

        Args:
            has_to_fall: Whether the scale falls after each bad update: one that does not is held
                from below, and lowering it no longer explains anything.
        Returns:
            What speaks against an overflow, in words; empty where it may be one.
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

    def warning(self, key: str) -> str:
        """What to log of an overflow that was the scaler's own; empty: nothing."""
        fall = self._falls[key]
        if fall.has_updated or fall.num_bad <= _NUM_QUIET:
            return ""
        return (
            f"the gradients overflow at a scale of {fall.last:g}, and no update was done yet after"
            f" {fall.num_bad} tries. The GradScaler lowers its scale; below"
            f" {fall.top / _FIRST_FALL:g} this counts as NaN"
        )

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: a resume judges as the run would have."""
        return {"total": self.total, "falls": {k: asdict(one) for k, one in self._falls.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judge as the run that was saved."""
        self.total = state["total"]
        self._falls = {key: _Fall(**one) for key, one in state["falls"].items()}
