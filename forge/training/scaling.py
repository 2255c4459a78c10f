"""When a `GradScaler` moves its scale, and which bad gradients that move explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from forge.state.registry import LiveState


@dataclass
class _Open:
    """A scaler that has stepped optimizers since its scale was last moved."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)


class Scaling:
    """Calls `GradScaler.update` once for all optimizers whose gradients were made with one scale.

    They may be two that share a scaler: `backward` for both, then an update of each. The second
    one's gradients carry the scale of before the first one's update.
    """

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self._open: dict[Any, _Open] = {}

    def begin(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Before the gradients of `optimizers` are unscaled.

        Where one has been stepped with this scale before, the scale moves first, and gradients that
        were made with the old one are changed to carry the new one: usually by a power of two,
        which costs no bit.
        """
        opened = self._open.get(scaler)
        if opened is None or not _have_common(opened.optimizers, optimizers):
            return
        before = scaler.get_scale()
        self._move(scaler)
        factor = scaler.get_scale() / before
        if factor != 1:
            gradients = [p.grad for p in (*_of(optimizers), *self._others(optimizers))]
            torch._foreach_mul_([one for one in gradients if one is not None], factor)

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
        if all(p.grad is None for p in self._others(optimizers)):
            self._move(scaler)

    def settle(self) -> None:
        """Move every scale that was to be moved: the iteration ends, or is saved."""
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

    def _others(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
        """Parameters of the other optimizers."""
        if all(_have_common([one], optimizers) for one in self._live.optimizers):
            return []
        own = {id(p) for p in _of(optimizers)}
        return [p for p in _of(self._live.optimizers) if id(p) not in own]


def _have_common(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return any(one is other for one in some for other in others)


def _of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


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
