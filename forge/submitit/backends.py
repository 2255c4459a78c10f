"""The submitit backend that started this process (Slurm or local), and how it restarts the job.

submitit's own `_requeue` is not used: under Slurm it ignores why the job stopped, and tries once.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.compat import of_submitit
from forge.errors import AlreadyRequeued, ExitCode, Reason
from forge.jobdir.job_files import write_atomically
from forge.process import world
from forge.process.world import RankInfo
from forge.slurm.job_info import Why
from forge.slurm.own_job import OwnJob

_LOOK_S = 0.05


class Backend(ABC):
    """The backend that started this process, and can restart its job."""

    job: str
    command: str
    """The shell line that resumes the job."""
    start: str
    """Identifies this start of the job: the same text in all of its tasks."""
    restart_code = int(ExitCode.REQUEUE)
    """The exit code that requests a restart."""

    def __init__(self, environment: Any) -> None:
        self.rank, self.size = environment.global_rank, environment.num_tasks
        self.folder: Path = environment.paths.folder
        self.result: Path = environment.paths.result_pickle
        self.submitted: Path = environment.paths.submitted_pickle
        self._id = environment.job_id
        self.own_signal: signal.Signals = signal.Signals[f"SIG{environment.USR_SIG}"]

    def world(self) -> RankInfo:
        """The rank of this task, and the number of tasks."""
        return world.of(os.environ)

    def raised_elsewhere(self, within_s: float) -> int | None:
        """Wait for another rank to store an error; returns the rank, or None after a timeout."""
        from submitit.core.utils import JobPaths

        until = time.monotonic() + within_s
        while True:
            for rank in set(range(self.size)) - {self.rank}:
                path = JobPaths(self.folder, self._id, rank).result_pickle
                if path.exists():
                    return rank
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S)

    @abstractmethod
    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """The reason why the job is being stopped, from the received signal and its exit code."""

    def refusal(self, restarts: int) -> str:
        """Why the job cannot be started again after this many restarts; empty if it can."""
        return ""

    def requeue(self) -> None:  # noqa: B027 - optional
        """Request a restart of the job, after this process ends with `restart_code`."""

    def store_error(self, text: str) -> None:
        """Make `job.result()` raise an error, if the main thread cannot raise one itself."""
        import cloudpickle

        write_atomically(self.result, cloudpickle.dumps(("error", text)))


class _Slurm(Backend):
    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._own = OwnJob(os.environ)
        self.job, self.command = self._own.name, self._own.command
        self.start = str(self._own.restarts)

    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """Queries Slurm, since a preemption and a cancellation send the same signals."""
        why = self._own.why()
        if why is Why.requeued:
            raise AlreadyRequeued
        if why is Why.cancelled:
            return Reason.cancelled
        if received is signal.SIGINT:
            return Reason.interrupted
        if why is Why.preempted:
            return Reason.preempted
        if why is Why.time_limit or received in (None, self.own_signal):
            return Reason.time_limit
        return Reason.signalled if received is signal.SIGTERM else Reason.requested

    def requeue(self) -> None:
        """Raises SlurmError if Slurm refuses."""
        self._own.requeue()


class _Local(Backend):
    def __init__(self, environment: Any) -> None:
        from submitit.local import local

        super().__init__(environment)
        self.job = environment.job_id
        self.start = str(os.getppid())  # submitit's controller, which never restarts an ended job
        self.restart_code = local.LOCAL_REQUEUE_RETURN_CODE
        self._most = inspect.signature(local.Controller.run).parameters["max_retry"].default
        line = ["env", "SUBMITIT_EXECUTOR=local", f"SUBMITIT_LOCAL_JOB_ID={self.job}"]
        line += [sys.executable, "-m", of_submitit.SUBMIT_MODULE, os.environ["SUBMITIT_FOLDER"]]
        self.command = f"cd {shlex.quote(os.getcwd())} && {shlex.join(line)}"

    def world(self) -> RankInfo:
        """submitit starts all tasks on this machine, from one parent process."""
        port = world.port_of("submitit", self.job)
        return RankInfo(self.rank, self.size, self.rank, self.size, "127.0.0.1", port)

    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """Derived from the exit code, which depends on the policy's action for the signal."""
        if code != ExitCode.REQUEUE:
            return Reason.interrupted if received is signal.SIGINT else Reason.cancelled
        return Reason.time_limit if received in (None, self.own_signal) else Reason.requested

    def refusal(self, restarts: int) -> str:
        """A message, since submitit's controller stops restarting without one."""
        text = f"submitit's LocalExecutor starts a job at most {self._most} times"
        return text if restarts >= self._most else ""


def current() -> Backend | None:
    """The backend that started this process; None without submitit, or with its debug executor."""
    kinds: dict[str, Callable[[Any], Backend]] = {"slurm": _Slurm, "local": _Local}
    kind = kinds.get(os.environ.get("SUBMITIT_EXECUTOR", ""))
    if kind is None or "SUBMITIT_FOLDER" not in os.environ:
        return None
    import submitit

    return kind(submitit.JobEnvironment())
