"""The Slurm job in which this process runs: why the job is being stopped, and its requeue.

Slurm signals all processes of the job together, this process too, so the commands that it starts
block these signals.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.errors import NoAnswer, NotRequeueable
from forge.shutdown import stopping
from forge.slurm import client
from forge.slurm.job_info import JobInfo, Why

ASK_S = 20.0
"""Timeout for one question to Slurm's controller, with retries while the controller is busy."""


class OwnJob:
    """The job that the environment describes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.name = client.own_job(environment)
        """The job's name for scontrol."""
        self.restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        self.command = f"scontrol requeue {self.name}"
        """The shell line that resumes the job."""

    def show(self, within_s: float = ASK_S) -> JobInfo:
        """Ask the controller about the job. Raises as `client.show` does."""
        with stopping.block_signals():
            return client.show(self.name, within_s)

    def why(self, info: JobInfo | None = None) -> Why:
        """Why the job is being stopped. Raises as `client.show` does.

        Args:
            info: The controller's answer; None to ask now.
        """
        info = self.show() if info is None else info
        with stopping.block_signals():
            return client.why(info, self.restarts, ASK_S)

    def requeue(self) -> None:
        """Requeue the job. The answer can get lost, since Slurm ends this step meanwhile.

        Raises:
            NoAnswer: If the controller does not answer.
            NotRequeueable: If Slurm refuses, and has not requeued the job itself.
        """
        try:
            with stopping.block_signals():
                client.requeue(self.name, ASK_S)
        except (NoAnswer, NotRequeueable):
            if self.why() is not Why.requeued:
                raise
