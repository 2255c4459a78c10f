"""One update under the NaN policy: look, decide, clip, step, and clear the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge import messages
from forge.errors import ForgeError
from forge.state.registry import StateRegistry
from forge.training.nan_policy import NanPolicy
from forge.training.scaling import Overflows, Scaling


class Updater:
    """Does the updates of a run's steps."""

    def __init__(self, live: StateRegistry, nan: NanPolicy, *, is_enabled: bool) -> None:
        self._live = live
        self._nan = nan
        self._is_enabled = is_enabled
        self._scaling = Scaling(live)
        self.overflows = Overflows()
        self._names = {id(p): name for name, p in live.parameters()}
        self._accepted: set[tuple[int, ...]] = set()
        """Objects that were given to an update, by `id`: `live` keeps them."""
        self._step = 0
        self.has_updated = False
        """Whether this iteration's update was decided about."""
        self.note: Callable[..., None] = lambda kind, **values: None
        """Writes an event into the ledger."""

    def begin(self, step: int) -> None:
        """A new iteration."""
        self._step = step
        self.has_updated = False

    def settle(self) -> None:
        """Finish what the updates of this iteration have left open, before its state is taken."""
        self._scaling.settle()

    def update(
        self,
        loss: torch.Tensor | float,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        schedule: Any,
        scaler: Any,
        clip_norm: float | None,
    ) -> bool:
        """See `Run.update`."""
        optimizers, schedules = _several(optimizer), _several(schedule)
        is_scaled = scaler is not None and scaler.is_enabled()
        if not self._is_enabled:
            self.has_updated = True
            if is_scaled:
                self._scaling.begin(scaler, optimizers)
            self._apply(optimizers, schedules, scaler, clip_norm, None)
            return True
        self._require_registered(optimizers, schedules, scaler)
        self.has_updated = True
        if is_scaled:
            self._scaling.begin(scaler, optimizers)
            for one in optimizers:
                scaler.unscale_(one)
        parameters = _with_gradients(optimizers)
        value, norm, problem = self._nan.look(
            loss, parameters, self._names, needs_norm=clip_norm is not None
        )
        if is_scaled:
            key = "+".join(map(self._live.name_of, (scaler, *optimizers)))
            is_own, problem = self._is_own(scaler, key, value, problem, has_to_fall=True)
        may_update = not (is_scaled and is_own) and self._judge(value, problem)
        if may_update:
            self._apply(optimizers, schedules, scaler, clip_norm, norm)
        else:
            if is_scaled:
                self._scaling.end(scaler, optimizers)  # the scale moves, and unscale_ is forgotten
            _clear(optimizers)
        return may_update

    def _is_own(
        self, scaler: Any, key: str, value: float, problem: str, *, has_to_fall: bool
    ) -> tuple[bool, str]:
        """Whether it was the scaler that made the gradients bad; and the problem, explained."""
        scale = float(scaler.get_scale())
        if not problem:
            self.overflows.good(key, scale)
            return False, ""
        against = self.overflows.explain(key, scale, has_to_fall=has_to_fall)
        if not math.isfinite(value):  # the loss is judged before it is scaled
            return False, problem
        if against:
            return False, f"{problem}, though {against}"
        self.overflows.total += 1
        self.note("overflow", step=self._step, scale=scale, total=self.overflows.total)
        if warning := self.overflows.warning(key):
            messages.warn(f"Step {self._step}: {warning}")
        return True, problem

    def _judge(self, value: float, problem: str) -> bool:
        may_update, message = self._nan.judge(self._step, value, problem)
        if problem:
            self.note("nan", step=self._step, problem=problem, total=self._nan.total)
        if message:
            messages.warn(message)
        return may_update

    def _apply(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[Any],
        scaler: Any,
        clip_norm: float | None,
        norm: torch.Tensor | None,
    ) -> None:
        """Clip, step, move the schedules, clear the gradients."""
        is_scaled = scaler is not None and scaler.is_enabled()
        if clip_norm is not None:
            if is_scaled and norm is None:
                for one in optimizers:
                    scaler.unscale_(one)
            parameters = _with_gradients(optimizers)
            if norm is None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            else:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        for one in optimizers:
            if is_scaled:
                scaler.step(one)
            else:
                one.step()
        if is_scaled:
            self._scaling.end(scaler, optimizers, schedules)
        else:
            for schedule in schedules:
                schedule.step()
        _clear(optimizers)

    def guard(self, loss: torch.Tensor | float) -> bool:
        """See `Run.guard`."""
        self.has_updated = True
        if not self._is_enabled:
            return True
        parameters = [p for _, p in self._live.parameters() if p.grad is not None]
        value, _, problem = self._nan.look(loss, parameters, self._names, needs_norm=False)
        for name, one in self._live.objects.items():
            if isinstance(one, torch.amp.GradScaler) and one.is_enabled():
                is_own, problem = self._is_own(one, name, value, problem, has_to_fall=False)
                if is_own:
                    return True  # the scaler leaves this step out itself
        return self._judge(value, problem)

    def _require_registered(
        self, optimizers: Sequence[Any], schedules: Sequence[Any], scaler: Any
    ) -> None:
        given = tuple(id(one) for one in (*optimizers, *schedules, scaler))
        if given in self._accepted:
            return
        for one in schedules:
            if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ForgeError(
                    "Run.update(schedule=…): ReduceLROnPlateau steps on a metric, not on every"
                    " update. Leave it out here, call schedule.step(metric) where the metric is"
                    " known, and give it to forge.Run(policy, …, schedule=schedule)."
                )
        for one in optimizers:
            if isinstance(one, torch.optim.LBFGS):
                raise ForgeError(
                    "Run.update(optimizer=…): LBFGS computes the loss several times in one step."
                    " Call optimizer.step(closure) yourself where run.guard(loss) is true, and give"
                    " it to forge.Run(policy, …, optimizer=optimizer)."
                )
        if not optimizers:
            raise ForgeError("Run.update(optimizer=[]): name the optimizers that are to step.")
        named = [("optimizer", one) for one in optimizers] + [("schedule", s) for s in schedules]
        for name, one in [*named, *([("scaler", scaler)] if scaler is not None else [])]:
            if not self._live.holds(one):
                raise ForgeError(
                    f"Run.update({name}=…): this {type(one).__name__} was not given to forge.Run,"
                    f" so its state would be lost at every stop. Write"
                    f" forge.Run(policy, …, {name}={name})."
                )
        self._accepted.add(given)


def _several(one: Any) -> list[Any]:
    if one is None:
        return []
    return list(one) if isinstance(one, list | tuple) else [one]


def _with_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [p for group in groups for p in group["params"] if p.grad is not None]


def _clear(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        one.zero_grad(set_to_none=True)
