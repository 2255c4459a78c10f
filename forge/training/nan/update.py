"""One update under the NaN policy: check, decide, clip, step, and clear the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from forge import messages
from forge.checkpoint.format import shards
from forge.compat import of_torch
from forge.errors import ForgeError
from forge.group.requests import Watcher
from forge.state.registry import StateRegistry
from forge.training.nan.nan_policy import Checked, NanPolicy
from forge.training.nan.norms import clip

if TYPE_CHECKING:
    from forge.training.nan.scaling import Scaling

_NO_OVERFLOWS: dict[str, Any] = {"total": 0, "falls": {}}
"""The state of `Overflows` if there is no GradScaler."""


class Updater(Watcher):
    """Does the updates of a run.

    Args:
        live: The objects of the run.
        nan: Judges the updates.
        note: Writes an event into the ledger: `Attempt._note`.
        is_enabled: Whether to judge them; else every update is done.
    """

    def __init__(
        self,
        live: StateRegistry,
        nan: NanPolicy,
        note: Callable[..., None] = lambda kind, **values: None,
        *,
        is_enabled: bool = True,
    ) -> None:
        self._live = live
        self._nan = nan
        self._note = note
        self._is_enabled = is_enabled
        self._scaling: Scaling | None = None
        """The state of the updates with a GradScaler; None before the first."""
        named = list(live.parameters())  # training cannot change them: a save would refuse it
        self._parameters = [parameter for _, parameter in named]
        self._names = {id(parameter): name for name, parameter in named}
        objects = live.objects.items()
        modules = [one for _, one in objects if isinstance(one, torch.nn.Module)]
        self._orders = [{id(p): i for i, p in enumerate(one.parameters())} for one in modules]
        """For each module, the position of its parameters."""
        self._scalers = [(n, o) for n, o in objects if isinstance(o, torch.amp.GradScaler)]
        self._accepted: set[tuple[int, ...]] = set()
        """Objects that were given to an update, by `id`; `live` keeps them alive."""
        self._step = 0
        self.has_updated = False
        """Whether the update of this iteration has been decided."""
        self.is_stepping = False
        """Whether `update` is calling the optimizers."""
        self.was_called = False
        """Whether any update of this attempt has been decided."""
        self._has_gradients = False
        """Whether an update of this iteration had gradients."""
        self._is_told = False
        """Whether an update without gradients was logged."""

    def on_step(self, step: int) -> None:
        """Begin a new iteration."""
        self._step = step
        self.has_updated = self._has_gradients = False

    on_loop_end = on_step

    def settle(self) -> None:
        """Finish pending scale updates of this iteration, before its state is saved."""
        if self._scaling is not None:
            self._scaling.settle()

    def _scaled(self) -> Scaling:
        if self._scaling is None:
            from forge.training.nan.scaling import Scaling  # few trainings have a GradScaler

            self._scaling = Scaling(self._live, self._note)
        return self._scaling

    def state_dict(self) -> dict[str, Any]:
        """Counters, for a checkpoint."""
        scaling = self._scaling
        overflows = scaling.overflows.state_dict() if scaling is not None else _NO_OVERFLOWS
        return {"nan": self._nan.state_dict(), "overflows": overflows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters from a checkpoint."""
        self._nan.load_state_dict(state["nan"])
        if self._scaling is not None or state["overflows"] != _NO_OVERFLOWS:
            self._scaled().overflows.load_state_dict(state["overflows"])

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
        self._require_registered(optimizers, schedules, scaler)
        self.has_updated = self.was_called = True
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        scaling = None if scaler is None else self._scaled()
        if scaling is not None:
            scaling.begin_update(scaler, optimizers)
            for one in optimizers:
                scaler.unscale_(one)
        parameters = self._in_order(_with_gradients(optimizers))
        self._look_for_gradients(parameters, optimizers)
        if self._is_enabled:
            checked = self._nan.check(loss, parameters, self._names, clip_norm=clip_norm)
            if scaler is not None and checked.do_ranks_differ:
                of_torch.note_found_inf(scaler, optimizers)
            may_update = self._may_update(checked, optimizers, scaler)
        else:
            checked, may_update = Checked(None), True
            if clip_norm is not None and parameters:
                clip(parameters, clip_norm)
        if may_update:
            self.is_stepping = True
            for one in optimizers:
                one.step() if scaler is None else scaler.step(one)
            self.is_stepping = False
        if scaling is not None:
            # Also after a skipped update: lowers the scale, and allows unscale_ to be called again.
            scaling.end_update(scaler, optimizers, schedules if may_update else ())
        elif may_update:
            for schedule in schedules:
                schedule.step()
        for one in optimizers:
            one.zero_grad(set_to_none=True)
        return may_update

    def _in_order(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters of one module in the module's order, in which `clip_grad_norm_` sums them."""
        ids = list(map(id, parameters))
        for order in self._orders:
            if order.keys() >= set(ids):
                # Without a function of Python for each parameter: this is done in each step.
                return [one for _, one in sorted(zip(map(order.get, ids), parameters, strict=True))]
        return parameters

    def _may_update(
        self, checked: Checked, optimizers: Sequence[torch.optim.Optimizer], scaler: Any
    ) -> bool:
        if scaler is None:
            return self._judge(checked.problem)
        key = "+".join(map(self._live.name_of, (scaler, *optimizers)))
        scaling = self._scaled()
        is_own, problem = scaling.is_own(scaler, key, checked, self._step, has_to_fall=True)
        return not is_own and self._judge(problem)

    def _judge(self, problem: str) -> bool:
        may_update, message = self._nan.judge(self._step, problem)
        if problem:
            self._note("nan", step=self._step, problem=problem, total=self._nan.total)
        if message:
            messages.warn(message)
        return may_update

    def should_step(self, loss: torch.Tensor | float) -> bool:
        """See `Run.should_step`."""
        self.has_updated = self.was_called = True
        if not self._is_enabled:
            return True
        parameters = [p for p in self._parameters if p.grad is not None]
        checked = self._nan.check(loss, parameters, self._names)
        problem = checked.problem
        for name, one in self._scalers:
            if not one.is_enabled():
                continue
            if checked.do_ranks_differ:  # this rank's scaler can find no inf, and then would step
                of_torch.note_found_inf(one, self._live.optimizers)
            else:
                scaling = self._scaled()
                is_own, problem = scaling.is_own(one, name, checked, self._step, has_to_fall=False)
                if is_own:
                    return True  # the scaler skips this step itself
        return self._judge(problem)

    def _look_for_gradients(
        self, parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Warn once of an update that changes nothing, since `backward` was not called.

        A frozen phase has no parameter that requires a gradient. A backward pass that reaches the
        parameters of another optimizer only, as that of a mixture of experts, leaves gradients
        there, or these were cleared by an update of the same step.
        """
        self._has_gradients = self._has_gradients or bool(parameters)
        if self._has_gradients or self._is_told or not _is_any_trainable(optimizers):
            return
        if any(p.grad is not None for _, p in self._live.parameters()):
            return
        self._is_told = True
        messages.warn(
            f"Step {self._step}: run.update found no gradient in any parameter, so the update"
            " changes nothing. Call `loss.backward()` before `run.update(loss, optimizer)`. Do not"
            " call zero_grad in between (run.update clears the gradients itself), and do not run"
            " the forward pass under torch.no_grad()"
        )

    def _require_registered(
        self, optimizers: Sequence[Any], schedules: Sequence[Any], scaler: Any
    ) -> None:
        given = tuple(map(id, (*optimizers, *schedules, scaler)))
        if given in self._accepted:
            return
        for one in schedules:
            if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ForgeError(
                    "run.update(schedule=…): ReduceLROnPlateau steps on a metric, not on every"
                    " update. Leave the schedule out here, call schedule.step(metric) when the"
                    " metric is known, and give the schedule to forge.Run(policy, …,"
                    " schedule=schedule)."
                )
        for one in optimizers:
            if isinstance(one, torch.optim.LBFGS):
                raise ForgeError(
                    "run.update(optimizer=…): LBFGS computes the loss several times in one step."
                    " Call optimizer.step(closure) yourself if run.should_step(loss) is true, and"
                    " give the optimizer to forge.Run(policy, …, optimizer=optimizer)."
                )
        if not optimizers:
            raise ForgeError("run.update(optimizer=[]): expected at least one optimizer.")
        named = [("optimizer", one) for one in optimizers] + [("schedule", s) for s in schedules]
        for name, one in [*named, *([("scaler", scaler)] if scaler is not None else [])]:
            if not self._live.has(one):
                raise ForgeError(
                    f"run.update({name}=…): this {type(one).__name__} was not given to forge.Run,"
                    f" so its state would be lost at every stop. Write"
                    f" `forge.Run(policy, …, {name}={name})`."
                )
        groups = [group for one in optimizers for group in one.param_groups]
        is_scaled = scaler is not None and scaler.is_enabled()
        if is_scaled and any(shards.is_sharded(p) for group in groups for p in group["params"]):
            raise ForgeError(
                "run.update(scaler=…): a GradScaler does not support sharded parameters: each rank"
                " would check only its own gradients. Train in bfloat16, which needs no scaler."
            )
        self._accepted.add(given)


def _several(one: Any) -> list[Any]:
    if one is None:
        return []
    return list(one) if isinstance(one, list | tuple) else [one]


def _is_any_trainable(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    groups = [group for one in optimizers for group in one.param_groups]
    return any(p.requires_grad for group in groups for p in group["params"])


def _with_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [p for group in groups for p in group["params"] if p.grad is not None]
