"""The threads that send the metrics of a Run to the loggers of `run.log_to`."""

from __future__ import annotations

import time
from typing import Any

from forge.config.schema import NanAction, Policy
from forge.errors import ForgeError
from forge.jobdir.metric_rows import MetricSource
from forge.training import misuse
from forge.training.start.attempt_io import AttemptIO

END_S = 60.0
"""Seconds that the end of a Run waits for its loggers; a stop has less."""


def check_loggers(loggers: tuple[Any, ...]) -> None:
    """Refuse what is not a logger of forge.

    Raises:
        ForgeError: Naming it.
    """
    for one in loggers:
        if isinstance(one, type) or not callable(getattr(one, "follow", None)):
            raise ForgeError(
                f"run.log_to(): expected loggers such as `forge.loggers.TensorBoard()`, found"
                f" {misuse.shown(one)}."
            )


class Followers:
    """The loggers of a Run, each with the metrics in its ledger.

    Args:
        directory: The ledger.
        policy: The policy of the Run: a rollback withdraws metrics.
        name: The name of the Run.
    """

    def __init__(self, directory: AttemptIO, policy: Policy, name: str | None) -> None:
        rollback, can_roll_back = policy.nan.rollback, policy.nan.action is NanAction.rollback
        self._source = MetricSource(
            job=directory.job,
            run=directory.ledger.run,
            name=name or "",
            attempt=directory.ledger.attempt,
            num_complete=lambda: directory.metrics.num_complete,
            rollback_steps=(
                rollback.steps_back + policy.nan.max_consecutive if can_roll_back else None
            ),
            every_steps=policy.checkpoint.every_steps or 1,
        )
        self._followers: list[Any] = []

    def add(self, logger: Any) -> None:
        """Let a logger follow the ledger, until `close`."""
        self._followers.append(logger.follow(self._source))

    def close(self, within_s: float = END_S) -> None:
        """Let all send what is left, at the same time; only the first call waits for them."""
        followers, self._followers = self._followers, []
        deadline = time.monotonic() + within_s
        for follower in followers:
            follower.finish()
        for follower in followers:
            follower.join(max(deadline - time.monotonic(), 0))
