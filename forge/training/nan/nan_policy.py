"""What a bad step leads to: warn, skip, roll back or halt, as `resilience.nan` says.

One check a step: the sum of loss and gradient norm is finite only where both are. Many ranks ask
each other whether it is finite on all, and clip meanwhile. It overflows on huge finite ones, too,
so an alarm is looked into exactly, by all ranks, before anything is decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any, NamedTuple

import torch

from forge import messages
from forge.config.schema import NanAction, NanConfig
from forge.group.collectives import finite_on_all_ranks, largest_of_ranks, place
from forge.training.decide import Halt, RollBack
from forge.training.nan.bad_steps import BadSteps, NaNState
from forge.training.nan.norms import clip, exact_norm, mean, non_finite, total_norm

_ACTION: Any = NanAction


class Checked(NamedTuple):
    """What one step's loss and gradients are like."""

    norm: torch.Tensor | None
    """L2 norm of the gradients; None where it was not computed."""
    problem: str = ""
    """What is wrong, in words; empty if nothing is."""
    is_loss_bad: bool = False
    do_ranks_differ: bool = False
    """Whether gradients are bad on one rank and good on another, whose scaler sees nothing."""


class _Badness(Enum):
    """What is wrong on a rank; the worst of any is what is wrong on all."""

    none = 0
    overflow = 1
    """Squares of huge gradients, or another rank's shards."""
    gradient = 2
    loss = 3


class NanPolicy:
    """Judges steps. `wants` says what the next boundary has to do."""

    def __init__(self, config: NanConfig) -> None:
        self._config = config
        history = max(config.max_consecutive, 100)  # a whole streak, with the step it began in
        self._bad_steps = BadSteps(config.max_consecutive, history)
        self.rollbacks = 0
        """Rollbacks so far."""
        self.lr_scale = 1.0
        """What the learning rate is multiplied by."""
        self._judged: int | None = None
        self.wants: Halt | RollBack | None = None

    @property
    def total(self) -> int:
        """Bad steps so far."""
        return self._bad_steps.state.total_nans

    @property
    def first_bad_step(self) -> int | None:
        """The first step of the streak that is under way."""
        state = self._bad_steps.state
        return state.nan_steps[-state.consecutive_nans :][0] if state.consecutive_nans else None

    def check(
        self,
        loss: torch.Tensor | float,
        parameters: Sequence[torch.Tensor],
        names: Mapping[int, str],
        *,
        clip_norm: float | None = None,
    ) -> Checked:
        """Check one step's loss and gradients, with one host synchronisation, and clip them.

        With many ranks: what is bad on one is bad on all, whose optimizers and scalers do the same.

        Args:
            loss: Scalar.
            parameters: Those that have a gradient.
            names: What they are called, by `id`.
            clip_norm: Largest L2 norm of the gradients.
        """
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = None
        if grads and (clip_norm is not None or self._config.check_gradients):
            norm = total_norm(grads)
        value = alarm = mean(loss)
        if norm is not None:
            alarm = value + norm.to(value.device)
        # The gradients' verdict travels, too. After `no_sync`, a comm hook or a fault of one device
        # they are one rank's own, and nothing says so.
        are_fine = finite_on_all_ranks(alarm)
        if clip_norm is not None and norm is not None:
            clip(parameters, clip_norm, norm.where(norm.isfinite(), 0.0))
        if are_fine():
            return Checked(norm)
        return self._look(value.item(), norm, parameters, names, clip_norm)

    def _look(
        self,
        loss: float,
        norm: torch.Tensor | None,
        parameters: Sequence[torch.Tensor],
        names: Mapping[int, str],
        clip_norm: float | None,
    ) -> Checked:
        """What is bad, on whichever rank: all ranks come here, or none."""
        named = [(names.get(id(p), "a parameter"), p.grad) for p in parameters]
        grads = [(name, grad) for name, grad in named if grad is not None]
        is_finite = norm is None or math.isfinite(norm.item())
        culprits = [] if is_finite else non_finite(grads)
        own, problem = _Badness.none, ""
        if not math.isfinite(loss):
            own, problem = _Badness.loss, f"the loss is {loss}"
        elif culprits and self._config.check_gradients:
            own, problem = _Badness.gradient, f"the gradient of {messages.few(culprits, 3)}"
        elif not is_finite and not culprits:
            own = _Badness.overflow
        rank, size = place()
        code, *found = largest_of_ranks([own.value * size + rank, bool(culprits), not culprits])
        worst, rank = divmod(code, size)
        if worst == _Badness.overflow.value and norm is not None:
            norm = exact_norm([grad for _, grad in grads])  # all do: it may be a collective
        if not is_finite and clip_norm is not None:
            clip(parameters, clip_norm, norm)  # which was left until now
        if worst > _Badness.overflow.value:
            problem = problem or f"on rank {rank}"
        return Checked(norm, problem, worst == _Badness.loss.value, all(found))

    def judge(self, step: int, problem: str) -> tuple[bool, str]:
        """Decide about a step that was looked at; once for each of its updates.

        Returns:
            Whether to update, and what to log (empty: nothing).
        """
        is_bad = bool(problem)
        self._bad_steps.record(is_bad=is_bad, step=step, is_same_step=step == self._judged)
        self._judged = step
        if not is_bad:
            return True, ""
        what = f"Step {step}: NaN or Inf: {problem}"
        count = self._bad_steps.state.consecutive_nans
        streak = f"{count} of {self._config.max_consecutive} in a row"
        action = self._config.action
        if action is _ACTION.warn:
            return True, f"{what}; the update is applied (`resilience.nan.action=warn`)"
        if action is _ACTION.halt:
            self.wants = Halt(f"{what}; `resilience.nan.action=halt`")
            return False, ""
        if not self._bad_steps.should_rollback:
            return False, f"{what}; this update is skipped ({streak})"
        if action is _ACTION.skip:
            self.wants = Halt(f"{what}; {streak} (`resilience.nan.max_consecutive`)")
        elif self.rollbacks >= self._config.rollback.max_rollbacks:
            self.wants = Halt(
                f"{what}; {streak}, and {self.rollbacks} rollbacks were made"
                " (`resilience.nan.rollback.max_rollbacks`)"
            )
        else:
            assert self.first_bad_step is not None
            self.wants = RollBack(self.first_bad_step)
        return False, f"{what}; this update is skipped ({streak})"

    def rolled_back(self) -> None:
        """Note that a rollback was done."""
        self.rollbacks += 1
        self.lr_scale *= self._config.rollback.lr_scale
        self.wants = self._judged = None
        self._bad_steps.state.consecutive_nans = 0

    def state_dict(self) -> dict[str, Any]:
        """Streak and budgets, for the checkpoint."""
        return {
            "detector": asdict(self._bad_steps.state),
            "rollbacks": self.rollbacks,
            "lr_scale": self.lr_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved streak and budgets."""
        self._bad_steps.state = NaNState(**state["detector"])
        self.rollbacks = state["rollbacks"]
        self.lr_scale = state["lr_scale"]
        self._judged = None


class RateScale:
    """Multiplies the learning rate while an optimizer steps, whatever schedule sets it."""

    def __init__(self, policy: NanPolicy, optimizer: torch.optim.Optimizer) -> None:
        self._policy = policy
        self._rates: list[Any] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._rates = []
        if self._policy.lr_scale != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._policy.lr_scale

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
