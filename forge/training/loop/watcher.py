"""A watcher of the loops of a Run: it is notified of steps and boundaries, and changes nothing."""

from __future__ import annotations

from typing import Any


class Watcher:
    """Base class: each method does nothing. Without watchers a step costs nothing more."""

    def on_boundary(self) -> None:
        """A step boundary is reached, before anything is decided there."""

    def on_step(self, batch: Any) -> None:
        """A step begins, with this batch; None without a loader."""

    def on_evaluation(self, step: int) -> None:
        """Functions of `run.every`, or the code after a pass, run after so many steps."""
