"""A value that the training logged, over all attempts of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value that the training logged with `run.log`, over all attempts of the job."""

    last: float
    last_step: int
    lowest: float
    lowest_step: int
    highest: float
    highest_step: int

    def best(self, *, is_higher_better: bool) -> tuple[float, int]:
        """The best value, and its step."""
        if is_higher_better:
            return self.highest, self.highest_step
        return self.lowest, self.lowest_step
