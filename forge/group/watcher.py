"""The base of all watchers of a Run, which can request a stop or a save at a step boundary."""

from __future__ import annotations

from typing import Any

from forge.group.facts import Request


class Watcher:
    """Base class: each method does nothing, and a method that a class leaves out costs nothing.

    The methods are called in the main thread; `step` is the number of steps done.
    """

    def on_boundary(self, step: int) -> None:
        """A step boundary is reached, before anything is decided there."""

    def request(self, step: int) -> Request | None:
        """A request of this rank at this boundary; called before each decision.

        Raises:
            ForgeError: If the job cannot continue.
        """

    def before_step(self, step: int) -> Request | None:
        """A request of this rank in place of another step."""

    def on_step(self, step: int) -> None:
        """The boundary is left: a step begins, with the reading of its batch."""

    def on_batch(self, batch: Any) -> None:
        """The batch of the step was read; None without a loader."""

    def on_evaluation(self, step: int) -> None:
        """Functions of `run.every`, or the code after a pass, begin."""

    def on_loop_end(self, step: int) -> None:
        """A loop has ended: the code after it begins."""

    def on_stop(self) -> None:
        """The attempt ends here: callbacks run, and child processes end."""
