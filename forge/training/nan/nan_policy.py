"""The action on a bad step: warn, skip, roll back or halt, as set in `resilience.nan`.

One check per step: the sum of loss and gradient norm is finite only if both are. With several
ranks, an all-reduce finds whether it is finite on all of them, while they clip. The sum can also
overflow for huge finite values, so after an alarm all ranks check exactly before they decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from forge import messages
from forge.config.schema import NanAction, NanConfig
from forge.group.collectives import (
    finite_on_all_ranks,
    largest_of_ranks,
    num_ranks,
    rank_and_size,
)
from forge.training.decide import Halt, RollBack
from forge.training.nan.norms import clip, exact_norm, mean, non_finite, total_norm


class Checked(NamedTuple):
    """The result of checking one step's loss and gradients."""

    norm: torch.Tensor | None
    """L2 norm of the gradients; None if it was not computed."""
    problem: str = ""
    """A description of the problem; empty if there is none."""
    is_loss_bad: bool = False
    do_ranks_differ: bool = False
    """Whether gradients are bad on some ranks only; a good rank's scaler does not notice."""


class _Badness(Enum):
    """The kind of problem on a rank; the worst kind of any rank counts for all."""

    none = 0
    overflow = 1
    """The squares of huge gradients overflow, or the shards of another rank are bad."""
    gradient = 2
    loss = 3


@dataclass
class NaNState:
    """Counters of the bad steps."""

    consecutive_nans: int = 0
    total_nans: int = 0
    last_good_loss: float = float("inf")
    last_good_step: int = 0
    nan_steps: list[int] = field(default_factory=list)
    """Indices of the newest `max_history` bad steps."""


class BadSteps:
    """Counts the bad steps.

    Args:
        max_consecutive: Bad steps in a row after which `should_rollback` is true.
        max_history: Number of indices of bad steps that are kept.
    """

    def __init__(self, max_consecutive: int, max_history: int) -> None:
        self.max_consecutive = max_consecutive
        self.max_history = max_history
        self._step: int | None = None
        self.reset()

    def record(self, *, is_bad: bool, step: int, is_same_step: bool = False) -> None:
        """Count the verdict on one step.

        A step is bad if one of its verdicts is: a good loss must not end the streak of a step
        whose gradients are bad, and no step counts twice.

        Args:
            is_bad: Whether the step is bad.
            step: The step.
            is_same_step: Whether the last verdict was about this step too.
        """
        state = self.state
        if not is_same_step:
            self._step, self._streak_before, self._is_bad = step, state.consecutive_nans, False
        if self._is_bad:
            return
        if not is_bad:
            state.consecutive_nans = 0
            state.last_good_step = step
            return
        self._is_bad = True
        state.consecutive_nans = self._streak_before + 1
        state.total_nans += 1
        state.nan_steps.append(step)
        del state.nan_steps[: -self.max_history or None]

    @property
    def should_rollback(self) -> bool:
        """Return whether the streak is long enough for a rollback.

        Returns:
            Whether `max_consecutive` steps in a row were bad.
        """
        return self.state.consecutive_nans >= self.max_consecutive

    def restore(self, state: NaNState) -> None:
        """Restore the counters from a checkpoint."""
        self.state = state

    def reset(self) -> None:
        """Reset all counters."""
        self.state = NaNState()
        self._step = None
        self._streak_before = 0
        self._is_bad = False


class NanPolicy:
    """Judges steps. `wants` is the action for the next boundary; `Boundary._decide` reads it."""

    def __init__(self, config: NanConfig) -> None:
        self._config = config
        history = max(config.max_consecutive, 100)  # a whole streak, with its first step
        self._bad_steps = BadSteps(config.max_consecutive, history)
        self.rollbacks = 0
        """Rollbacks so far."""
        self.lr_scale = 1.0
        """Factor of the learning rate."""
        self._is_alone = num_ranks() == 1
        """Asked once, since asking takes longer than checking a number."""
        self._judged: int | None = None
        self.wants: Halt | RollBack | None = None

    @property
    def total(self) -> int:
        """Bad steps so far."""
        return self._bad_steps.state.total_nans

    @property
    def first_bad_step(self) -> int | None:
        """The first step of the current streak."""
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

        With several ranks, a problem on one rank counts for all, so that all optimizers and scalers
        do the same.

        Args:
            loss: Scalar.
            parameters: The parameters that have a gradient.
            names: Their names, by `id`.
            clip_norm: Largest L2 norm of the gradients.
        """
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = None
        if grads and (clip_norm is not None or self._config.check_gradients):
            norm = total_norm(grads)
        value = alarm = mean(loss)
        if norm is not None:
            alarm = value + norm.to(value.device)
        # Ranks exchange whether gradients are good, too: after `no_sync`, a comm hook or a fault
        # of one device, gradients differ between ranks without an error.
        is_known_fine = alarm.is_cpu and self._is_alone and math.isfinite(alarm.item())
        are_fine = None if is_known_fine else finite_on_all_ranks(alarm)
        if clip_norm is not None and norm is not None:
            # Before the answer of a device or of other ranks: clip meanwhile, unless it is bad.
            clip(parameters, clip_norm, norm if is_known_fine else norm.nan_to_num(0.0, 0.0, 0.0))
        if are_fine is None or are_fine():
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
        """Find the problem, on any rank; called on all ranks or on none."""
        named = [(names.get(id(p), "a parameter"), p.grad) for p in parameters]
        grads = [(name, grad) for name, grad in named if grad is not None]
        is_finite = norm is None or math.isfinite(norm.item())
        culprits = [] if is_finite else non_finite(grads)
        own, problem = _Badness.none, ""
        if not math.isfinite(loss):
            own, problem = _Badness.loss, f"the loss is {loss}"
        elif culprits and self._config.check_gradients:
            own, problem = (
                _Badness.gradient,
                f"the gradient of {messages.truncate_list(culprits, 3)}",
            )
        elif not is_finite and not culprits:
            own = _Badness.overflow
        rank, size = rank_and_size()
        code, *found = largest_of_ranks([own.value * size + rank, bool(culprits), not culprits])
        worst, rank = divmod(code, size)
        if worst == _Badness.overflow.value and norm is not None:
            norm = exact_norm([grad for _, grad in grads])  # on all ranks: can be a collective
        if not is_finite and clip_norm is not None:
            clip(parameters, clip_norm, norm)  # was postponed until now
        if worst > _Badness.overflow.value:
            problem = problem or f"on rank {rank}"
        return Checked(norm, problem, worst == _Badness.loss.value, all(found))

    def judge(self, step: int, problem: str) -> tuple[bool, str]:
        """Decide about a step that was checked; called once for each of its updates.

        Returns:
            Whether to update, and the text to log (empty: nothing).
        """
        is_bad = bool(problem)
        self._bad_steps.record(is_bad=is_bad, step=step, is_same_step=step == self._judged)
        self._judged = step
        if not is_bad:
            return True, ""
        what = f"NaN or Inf in step {step}: {problem}"
        count = self._bad_steps.state.consecutive_nans
        plural = "s" * (count > 1)
        streak = f"{count} bad step{plural} in a row, limit {self._config.max_consecutive}"
        action = self._config.action
        if action is NanAction.warn:
            text = f"{what}; the update was applied (`resilience.nan.action=warn`)"
            is_told = self.total & (self.total - 1) != 0  # all steps are bad after NaN weights
            return True, "" if is_told else f"{text}; bad steps so far: {self.total}"
        if action is NanAction.halt:
            self.wants = Halt(f"{what}; `resilience.nan.action=halt`")
            return False, ""
        if not self._bad_steps.should_rollback:
            return False, f"{what}; this update is skipped ({streak})"
        if action is NanAction.skip:
            self.wants = Halt(f"{what}; {streak} (`resilience.nan.max_consecutive`)")
        elif self.rollbacks >= self._config.rollback.max_rollbacks:
            self.wants = Halt(
                f"{what}; {streak}, and no rollback is left"
                f" (`resilience.nan.rollback.max_rollbacks={self._config.rollback.max_rollbacks}`)"
            )
        else:
            assert self.first_bad_step is not None
            self.wants = RollBack(self.first_bad_step)
        return False, f"{what}; this update is skipped ({streak})"

    def rolled_back(self) -> None:
        """Count a rollback."""
        self.rollbacks += 1
        self.lr_scale *= self._config.rollback.lr_scale
        self.wants = self._judged = None
        self._bad_steps.state.consecutive_nans = 0

    def state_dict(self) -> dict[str, Any]:
        """Counters, for a checkpoint."""
        return {
            "detector": asdict(self._bad_steps.state),
            "rollbacks": self.rollbacks,
            "lr_scale": self.lr_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters from a checkpoint."""
        self._bad_steps.restore(NaNState(**state["detector"]))
        self.rollbacks = state["rollbacks"]
        self.lr_scale = state["lr_scale"]
        self._judged = None
