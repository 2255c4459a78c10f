"""The job of Slurm's that this process runs in: why it is being stopped, and its requeue.

For a process of the job itself. Slurm signals it together with all others, so the commands that it
starts block these signals.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.errors import NoAnswer, NotRequeueable
from forge.shutdown import stopping
from forge.slurm import client
from forge.slurm.client import JobInfo, Why

ASK_S = 20.0
"""One question to Slurm's controller, repeated while it is busy, may take so long."""


class OwnJob:
    """As the environment describes it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.name = client.own_job(environment)
        """For scontrol."""
        self.restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        self.command = f"scontrol requeue {self.name}"
        """The shell line that resumes the job."""

    def show(self, within_s: float = ASK_S) -> JobInfo:
        """What the controller says of it. Raises as `client.show` does."""
        with stopping.block_signals():
            return client.show(self.name, within_s)

    def why(self, info: JobInfo | None = None) -> Why:
        """Why it is being stopped. Raises as `client.show` does.

        Args:
            info: What the controller said; None: it is asked now.
        """
        info = self.show() if info is None else info
        with stopping.block_signals():
            return client.why(info, self.restarts, ASK_S)

    def requeue(self) -> None:
        """Put it back into the queue; the answer may be lost, since Slurm ends this step meanwhile.

        Raises:
            NoAnswer: If nobody answers.
            NotRequeueable: If Slurm refuses, and has not brought it back by itself.
        """
        try:
            with stopping.block_signals():
                client.requeue(self.name, ASK_S)
        except (NoAnswer, NotRequeueable):
            if self.why() is not Why.requeued:
                raise
