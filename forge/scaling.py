"""When a `GradScaler` moves its scale: not while gradients wait that were made with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from forge.live_state import LiveState


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

    def begin(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of `optimizer` are unscaled.

        Where it has been stepped with this scale before, the scale moves first, and gradients that
        were made with the old one are changed to carry the new one: usually by a power of two,
        which costs no bit.
        """
        opened = self._open.get(scaler)
        if opened is None or all(one is not optimizer for one in opened.optimizers):
            return
        before = scaler.get_scale()
        self._move(scaler)
        factor = scaler.get_scale() / before
        if factor != 1:
            gradients = [p.grad for p in (*_of(optimizer), *self._others(optimizer))]
            torch._foreach_mul_([one for one in gradients if one is not None], factor)

    def end(self, scaler: Any, optimizer: torch.optim.Optimizer, schedule: Any = None) -> None:
        """`optimizer` was stepped, or was not to be; `schedule` steps where the scaler let it."""
        opened = self._open.setdefault(scaler, _Open())
        opened.optimizers.append(optimizer)
        if schedule is not None:
            opened.schedules.append(schedule)
        if all(p.grad is None for p in self._others(optimizer)):
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

    def _others(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Parameters of the other optimizers."""
        if self._live.optimizers == [optimizer]:
            return []
        own = {id(p) for p in _of(optimizer)}
        return [p for one in self._live.optimizers for p in _of(one) if id(p) not in own]


def _of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
