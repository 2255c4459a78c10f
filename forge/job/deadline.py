"""The deadlines of a task: its end time, and the time after which the supervisor kills it.

Time in which the task or the supervisor could not run does not count. The signal before the time
limit can come early: then the task can continue until the announced end, which can be extended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from forge.jobdir.plan import JobPlan
from forge.process import time_limit


class Deadline:
    """The seconds that a task has left after the first signal to stop."""

    def __init__(self, margin_s: float, environment: Mapping[str, str], folder: Path) -> None:
        """No signal has come yet.

        Args:
            margin_s: Seconds added to each timeout: a task that ends itself reports more.
            environment: The environment of the task, with its end time.
            folder: The folder in which the wrapper writes a changed end time.
        """
        self._margin_s, self._environment = margin_s, environment
        self._moved = folder / time_limit.MOVED
        self._is_announced = False
        """Whether the signal before the time limit has started the deadline."""
        self.left_s = math.inf
        """Seconds left; infinite before the first signal to stop."""

    @property
    def has_begun(self) -> bool:
        """Whether the task was asked to stop."""
        return self.left_s < math.inf

    def begin(self, timeout_s: float, *, is_announced: bool = False) -> None:
        """A signal to stop has come; a later signal can only shorten the deadline.

        Args:
            timeout_s: Seconds for the task to exit; 0: it has no deadline.
            is_announced: Whether it is the signal before the time limit.
        """
        if timeout_s <= 0 or (is_announced and self.has_begun):
            return
        timeout_s = max(timeout_s, self._until_end_s()) if is_announced else timeout_s
        self.left_s = min(self.left_s, timeout_s + self._margin_s)
        self._is_announced = is_announced

    def pass_by(self, seconds: float) -> bool:
        """Count seconds in which the task could run; whether the deadline has passed."""
        self.left_s -= seconds
        if self.left_s <= 0 and self._is_announced and self._until_end_s() > 0:
            self.left_s = self._until_end_s() + self._margin_s  # the limit was extended meanwhile
        return self.left_s <= 0

    def _until_end_s(self) -> float:
        """Seconds until the time limit that was announced to the task; 0.0 without a limit."""
        end, now = time_limit.end_time_from_env(self._environment) or 0.0, time.time()
        if time_limit.END_TIME not in self._environment:
            return 0.0
        return max(time_limit.moved_left_s(self._moved, end - now, now), 0.0)


def env_for_child(
    left_s: float | None, plan: JobPlan, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that a wrapper adds to the environment of a task before it starts.

    If a task ignores the signal of the time limit, its supervisor kills it `shutdown.timeout_s`
    after the signal, which is before the limit: that is the task's end time. A job inside another
    one ends at the earlier of both end times.

    Args:
        left_s: Seconds until the task's time limit; None: no limit of its own.
        plan: The job's plan.
        environment: The task's environment so far.
    """
    if left_s is None:
        return {}
    stops = plan.actions.get(plan.signal) in ("stop", "requeue")
    if stops and plan.timeout_s > 0:
        left_s -= max(plan.warning_s - plan.timeout_s, 0.0)
    end = min(time.time() + left_s, time_limit.end_time_from_env(environment) or math.inf)
    return {time_limit.END_TIME: f"{end:.3f}"}
