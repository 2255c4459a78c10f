"""NaN detection, and checks of the devices that a job runs on."""

from __future__ import annotations

import math

import torch

from forge import messages
from forge.config.schema import NanAction
from forge.group.collectives import largest_of_ranks
from forge.health.devices import check_gpu_health, check_nccl_health
from forge.training.nan.nan_policy import BadSteps, NaNState
from forge.training.nan.norms import mean, non_finite, total_norm

__all__ = ["NaNDetector", "NaNState", "check_gpu_health", "check_nccl_health"]

_ACTIONS = ("warn", "skip", "raise")
"""Names of `NanAction` that apply to a single step; a rollback is up to the caller."""


class NaNDetector(BadSteps):
    """Checks losses and gradients for NaN and Inf. Every rank gets the same answer.

    A check returns False for a bad step, on which the caller should not call `optimizer.step()`.

    Args:
        action: What a check also does at a bad step. warn: log a warning; skip: nothing; raise:
            raise RuntimeError.
        max_consecutive: Bad steps in a row after which `should_rollback` is true.
        max_history: How many numbers of bad steps `state` remembers.
    Raises:
        ValueError: If the action is unknown.
    """

    def __init__(
        self, action: str = "warn", max_consecutive: int = 5, max_history: int = 100
    ) -> None:
        if action not in _ACTIONS:
            raise ValueError(f"Invalid NaN action: {action!r}; expected {' | '.join(_ACTIONS)}")
        super().__init__(max_consecutive, max_history)
        self.action = action
        self._action = NanAction[action]

    def check_loss(self, loss: torch.Tensor | float, step: int) -> bool:
        """Check the loss for NaN and Inf. It synchronises the GPU with the host once.

        Args:
            loss: A number or a tensor; bad if any element is not finite.
            step: The current step.
        Returns:
            Whether the loss is finite on all ranks.
        Raises:
            RuntimeError: If it is not finite, and the action is `raise`.
        """
        value, device = float(mean(loss).item()), None
        if isinstance(loss, torch.Tensor):
            device = loss.device
        is_bad = any(largest_of_ranks([not math.isfinite(value)], device))
        self.record(is_bad=is_bad, step=step)
        if not is_bad:
            self.state.last_good_loss = value
        else:
            where = value if not math.isfinite(value) else "on another rank"
            self._act(f"NaN/Inf loss at step {step}: {where}")
        return not is_bad

    def check_gradients(self, model: torch.nn.Module, step: int) -> bool:
        """Check the gradients for NaN and Inf. It synchronises the GPU with the host once.

        Args:
            model: The module whose parameters have the gradients.
            step: The current step.
        Returns:
            Whether every gradient is finite on all ranks.
        Raises:
            RuntimeError: If a gradient is not finite, and the action is `raise`.
        """
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        culprits = []
        if named and not math.isfinite(float(total_norm([g for _, g in named]).item())):
            culprits = non_finite(named)
        device = named[0][1].device if named else None
        is_bad = any(largest_of_ranks([bool(culprits)], device))
        if is_bad:
            self.record(is_bad=True, step=step, is_same_step=step == self._step)
            where = ", ".join(culprits[:3]) or "on another rank"
            self._act(f"NaN/Inf gradient at step {step}: {where}")
        return not is_bad

    def _act(self, message: str) -> None:
        if self._action is NanAction.halt:
            raise RuntimeError(message)
        if self._action is NanAction.warn:
            messages.warn(message)
