"""Counts bad steps, in total and in a row."""

from __future__ import annotations

from dataclasses import dataclass, field


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
