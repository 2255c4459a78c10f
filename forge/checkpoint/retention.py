"""Which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path

from forge.checkpoint.names import step_of
from forge.config import CheckpointConfig


class Retention:
    """What `resilience.checkpoint` keeps, and what a rollback may go back to."""

    def __init__(
        self, config: CheckpointConfig, keep_back_steps: int | None, keep_back_every: int
    ) -> None:
        self._config = config
        self._keep_back_steps = keep_back_steps
        self._keep_back_every = keep_back_every

    def kept(self, good: list[Path], first_bad_step: int | None) -> set[str]:
        """The names among `good`, newest first, that stay.

        Args:
            first_bad_step: Where a streak of bad steps began that is under way.
        """
        kept = {path.name for path in good[: self._config.keep_last]}
        every = self._config.keep_every_steps
        if every:
            kept |= {path.name for path in good if (step_of(path) or 0) % every == 0}
        if self._keep_back_steps is not None and good:
            newest = step_of(good[0]) or 0
            back_to = (newest if first_bad_step is None else first_bad_step) - self._keep_back_steps
            # Only those that every run of this job has: where a rollback goes must not depend
            # on when this one was stopped. The younger ones are old enough later.
            planned = [p for p in good if (step_of(p) or 0) % self._keep_back_every == 0]
            num_young = sum((step_of(p) or 0) > back_to for p in planned)
            kept |= {path.name for path in planned[: num_young + 1]}
        return kept
