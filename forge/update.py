"""One update under the NaN policy: look, decide, clip, step, and clear the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forge import messages
from forge.errors import ForgeError
from forge.live_state import LiveState
from forge.nan_policy import NanPolicy
from forge.scaling import Scaling


class Updater:
    """Does the updates of a run's steps."""

    def __init__(self, live: LiveState, nan: NanPolicy, is_enabled: bool) -> None:
        self._live = live
        self._nan = nan
        self._is_enabled = is_enabled
        self._scaling = Scaling(live)
        self._names = {id(p): name for name, p in live.parameters()}
        self._step = 0
        self.has_updated = False
        """Whether this iteration's update was decided about."""
        self.losses: list[torch.Tensor | float] = []
        """The losses of this iteration's updates; several where there are several optimizers."""
        self.is_guarded = False
        """Whether the user does this iteration's update: when it ends is not known here."""
        self._repeated: list[torch.Tensor | float] = []
        self._restore: Callable[[], None] | None = None
        self.after_update: Callable[[], None] = lambda: None

    def begin(self, step: int) -> None:
        """A new iteration."""
        self._step = step
        self.has_updated = self.is_guarded = False
        self.losses = []

    def repeat(self, losses: list[torch.Tensor | float], restore: Callable[[], None]) -> None:
        """The updates of this iteration were done before a stop, with these losses.

        They are not done again: the last one calls `restore` in its place. The losses are put
        back, since the repeated step computed them with the weights of after the updates.
        """
        self._repeated, self._restore = losses, restore

    def end(self) -> None:
        """The iteration ended by itself.

        Raises:
            ForgeError: Where its update was to be repeated, but did not come.
        """
        if self.is_repeating:
            raise ForgeError(
                f"Step {self._step} was saved after its run.update(), but run.update() was not"
                " called when the step was repeated. Has the training script changed?"
            )

    def settle(self) -> None:
        """Finish what the updates of this iteration have left open, before its state is taken."""
        self._scaling.settle()

    @property
    def is_repeating(self) -> bool:
        """Whether updates of this iteration are still to be repeated."""
        return self._restore is not None

    def update(
        self,
        loss: torch.Tensor | float,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        scaler: Any,
        clip_norm: float | None,
    ) -> bool:
        """See `Run.update`."""
        is_scaled = scaler is not None and scaler.is_enabled()
        if not self._is_enabled:
            if is_scaled:
                self._scaling.begin(scaler, optimizer)
            self._apply(optimizer, schedule, scaler, clip_norm, None)
            return True
        self._require_registered(optimizer=optimizer, schedule=schedule, scaler=scaler)
        self.has_updated = True
        if self._restore is not None:
            loss = self._put_back(loss)
        self.losses.append(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))
        if self._restore is not None:
            if len(self.losses) == len(self._repeated):
                restore, self._restore = self._restore, None
                restore()
            return True
        if is_scaled:
            self._scaling.begin(scaler, optimizer)
            scaler.unscale_(optimizer)
        gradients = self._gradients(optimizer)
        value, norm, problem = self._nan.look(loss, gradients, clip_norm is not None)
        if is_scaled and _is_own_inf(scaler, problem):
            self._apply(optimizer, None, scaler, None, None)
            self.after_update()
            return False
        may_update, message = self._nan.judge(self._step, value, problem)
        if message:
            messages.warn(message)
        if may_update:
            self._apply(optimizer, schedule, scaler, clip_norm, norm)
        else:
            if is_scaled:
                self._scaling.end(scaler, optimizer)  # forget what unscale_ noted
            optimizer.zero_grad(set_to_none=True)
        self.after_update()
        return may_update

    def _put_back(self, loss: torch.Tensor | float) -> torch.Tensor | float:
        was = self._repeated[len(self.losses)]
        if isinstance(loss, torch.Tensor) and isinstance(was, torch.Tensor):
            loss.detach().copy_(was)
        return loss

    def _apply(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        scaler: Any,
        clip_norm: float | None,
        norm: torch.Tensor | None,
    ) -> None:
        """Clip, step, move the schedule, clear the gradients."""
        is_scaled = scaler is not None and scaler.is_enabled()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if clip_norm is not None:
            if norm is None:
                if is_scaled:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
            else:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        if is_scaled:
            scaler.step(optimizer)
            self._scaling.end(scaler, optimizer, schedule)
        else:
            optimizer.step()
            if schedule is not None:
                schedule.step()
        optimizer.zero_grad(set_to_none=True)

    def guard(self, loss: torch.Tensor | float) -> bool:
        """See `Run.guard`."""
        if not self._is_enabled:
            return True
        self.has_updated = self.is_guarded = True
        gradients = [(name, p.grad) for name, p in self._live.parameters() if p.grad is not None]
        value, _, problem = self._nan.look(loss, gradients, needs_norm=False)
        scalers = (o for o in self._live.objects.values() if isinstance(o, torch.amp.GradScaler))
        if problem and any(one.is_enabled() and _is_own_inf(one, problem) for one in scalers):
            return True  # the scaler leaves this step out itself
        may_update, message = self._nan.judge(self._step, value, problem)
        if message:
            messages.warn(message)
        return may_update

    def _gradients(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        return [
            (self._names.get(id(p), "a parameter"), p.grad)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]

    def _require_registered(self, **objects: Any) -> None:
        if isinstance(objects.get("schedule"), torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ForgeError(
                "Run.update(schedule=…): ReduceLROnPlateau steps on a metric, not on every update."
                " Leave it out here, call schedule.step(metric) where the metric is known, and"
                " give it to forge.Run(policy, …, schedule=schedule)."
            )
        if isinstance(objects.get("optimizer"), torch.optim.LBFGS):
            raise ForgeError(
                "Run.update(optimizer=…): LBFGS computes the loss several times in one step. Call"
                " optimizer.step(closure) yourself where run.guard(loss) is true, and give it to"
                " forge.Run(policy, …, optimizer=optimizer)."
            )
        for name, one in objects.items():
            if one is not None and not self._live.holds(one):
                raise ForgeError(
                    f"Run.update({name}=…): this {type(one).__name__} was not given to forge.Run,"
                    f" so its state would be lost at every stop. Write"
                    f" forge.Run(policy, …, {name}={name})."
                )


def _is_own_inf(scaler: torch.amp.GradScaler, problem: str) -> bool:
    """Whether the scaler brought it about: it probes for the largest scale without overflow."""
    return problem.startswith("the gradient") and float(scaler.get_scale()) >= 1.0
