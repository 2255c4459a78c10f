"""The threads that send the metrics of a Run to the loggers of `run.log_to`."""

from __future__ import annotations

import time
from typing import Any

from forge.errors import ForgeError
from forge.training import misuse

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
    """The loggers of a Run, as `Logger.follow` returns them."""

    def __init__(self) -> None:
        self._followers: list[Any] = []

    def add(self, follower: Any) -> None:
        """Remember a follower, to close it with the Run."""
        self._followers.append(follower)

    def close(self, within_s: float = END_S) -> None:
        """Let all send what is left, at the same time; only the first call waits for them."""
        followers, self._followers = self._followers, []
        deadline = time.monotonic() + within_s
        for follower in followers:
            follower.finish()
        for follower in followers:
            follower.join(max(deadline - time.monotonic(), 0))
