"""What submitit started this process with, and how the job is started again.

submitit's own `_requeue` is not used: under Slurm it asks for no reason, and tries once.
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
from forge.process.world import World
from forge.slurm.client import Why
from forge.slurm.own_job import OwnJob

_LOOK_S = 0.05


class Backend(ABC):
    """What started this process, and can start it again."""

    job: str
    command: str
    """The shell line that resumes the job."""
    start: str
    """Which start of the job this is: the same for all of its tasks."""
    restart_code = int(ExitCode.REQUEUE)
    """What a process that is to be started again ends with."""

    def __init__(self, environment: Any) -> None:
        self.rank, self.size = environment.global_rank, environment.num_tasks
        self.folder: Path = environment.paths.folder
        self.result: Path = environment.paths.result_pickle
        self.submitted: Path = environment.paths.submitted_pickle
        self._id = environment.job_id
        self.own_signal: signal.Signals = signal.Signals[f"SIG{environment.USR_SIG}"]

    def world(self) -> World:
        """This task among those of the job."""
        return world.of(os.environ)

    def raised_elsewhere(self, within_s: float) -> int | None:
        """Another rank that has stored an error, if one does in time."""
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
        """Why the job is being stopped, having received that signal and leaving with that code."""

    def refusal(self, restarts: int) -> str:
        """Why the job cannot be started again after so many restarts; empty where it can."""
        return ""

    def requeue(self) -> None:  # noqa: B027 - optional
        """Have the job started again, once this process has ended with `restart_code`."""

    def store_error(self, text: str) -> None:
        """What `job.result()` raises, where the main thread cannot raise it."""
        import cloudpickle

        write_atomically(self.result, cloudpickle.dumps(("error", text)))


class _Slurm(Backend):
    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._own = OwnJob(os.environ)
        self.job, self.command = self._own.name, self._own.command
        self.start = str(self._own.restarts)

    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """Slurm is asked: the signals are the same for a preemption and for a cancel."""
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
        """Raises SlurmError if Slurm does not do it."""
        self._own.requeue()


class _Local(Backend):
    def __init__(self, environment: Any) -> None:
        from submitit.local import local

        super().__init__(environment)
        self.job = environment.job_id
        self.start = str(os.getppid())  # submitit's controller, which starts no job that has ended
        self.restart_code = local.LOCAL_REQUEUE_RETURN_CODE
        self._most = inspect.signature(local.Controller.run).parameters["max_retry"].default
        line = ["env", "SUBMITIT_EXECUTOR=local", f"SUBMITIT_LOCAL_JOB_ID={self.job}"]
        line += [sys.executable, "-m", of_submitit.SUBMIT_MODULE, os.environ["SUBMITIT_FOLDER"]]
        self.command = f"cd {shlex.quote(os.getcwd())} && {shlex.join(line)}"

    def world(self) -> World:
        """submitit starts all of them on this machine, by one process that is their parent."""
        port = world.port_of("submitit", self.job)
        return World(self.rank, self.size, self.rank, self.size, "127.0.0.1", port)

    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """As the policy's action for the signal says, which the exit code tells."""
        if code != ExitCode.REQUEUE:
            return Reason.interrupted if received is signal.SIGINT else Reason.cancelled
        return Reason.time_limit if received in (None, self.own_signal) else Reason.requested

    def refusal(self, restarts: int) -> str:
        """submitit's controller would give up without a word."""
        text = f"submitit's LocalExecutor starts a job at most {self._most} times"
        return text if restarts >= self._most else ""


def current() -> Backend | None:
    """What started this process; None where submitit did not, or runs it in its own process."""
    kinds: dict[str, Callable[[Any], Backend]] = {"slurm": _Slurm, "local": _Local}
    kind = kinds.get(os.environ.get("SUBMITIT_EXECUTOR", ""))
    if kind is None or "SUBMITIT_FOLDER" not in os.environ:
        return None
    import submitit

    return kind(submitit.JobEnvironment())
