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

from forge import messages
from forge.compat import of_submitit
from forge.config.schema import Policy
from forge.errors import ExitCode, NoSuchJob, Reason
from forge.filesystem.files import make_directory
from forge.job.ending import Ending
from forge.job.job import Job, Trainings
from forge.job.last_act import LastAct
from forge.jobdir.job_files import forge_dir, write_atomically
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import RequeueLimits
from forge.process import world
from forge.process.world import RankInfo
from forge.slurm.job_info import IMPOSED, Why
from forge.slurm.own_job import OwnJob

_LOOK_S = 0.05


class SubmittedTask:
    """A task of the job, as submitit describes it in this process."""

    def __init__(self, environment: Any) -> None:
        """`environment`: submitit's `JobEnvironment`."""
        self.rank, self.size = environment.global_rank, environment.num_tasks
        self.folder: Path = environment.paths.folder
        self.submitted: Path = environment.paths.submitted_pickle
        self.job_id: str = environment.job_id
        self.own_signal: signal.Signals = signal.Signals[f"SIG{environment.USR_SIG}"]
        self._result: Path = environment.paths.result_pickle

    def raised_elsewhere(self, within_s: float) -> int | None:
        """Wait for another rank to store an error; returns the rank, or None after a timeout."""
        from submitit.core.utils import JobPaths

        until = time.monotonic() + within_s
        while True:
            for rank in set(range(self.size)) - {self.rank}:
                path = JobPaths(self.folder, self.job_id, rank).result_pickle
                if path.exists():
                    return rank
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S)

    def remove_result(self) -> None:
        """Remove the result of an earlier start.

        submitit also fails if a kill while it stored a result has left a temporary file.
        """
        for path in (self._result, self._result.with_suffix(f"{self._result.suffix}.save_tmp")):
            path.unlink(missing_ok=True)

    def store_error(self, text: str) -> None:
        """Make `job.result()` raise an error, if the main thread cannot raise one itself."""
        import cloudpickle

        write_atomically(self._result, cloudpickle.dumps(("error", text)))


class SubmittedJob(LastAct, ABC):
    """The job of this process, whose rank 0 restarts it."""

    command: str
    """The shell line that resumes the job."""
    restart_code = int(ExitCode.REQUEUE)
    """The exit code that requests a restart."""

    def __init__(
        self, task: SubmittedTask, directory: Path, policy: Policy, job: str, start: str
    ) -> None:
        """`job` and `start`: see `JobState`; the same in all tasks of the job."""
        nodes = os.environ.get("SLURM_JOB_NODELIST") or os.uname().nodename
        state = JobState(state=State.queued, job=job, start=start, nodes=nodes)
        limits = RequeueLimits.of(policy.requeue)
        trainings = Trainings([directory], policy.checkpoint.dir, are_expected=True)
        super().__init__(Job(directory, limits, trainings, state, messages.warn))
        self.task = task

    def begin_job(self) -> JobState | None:
        """Begin this start on rank 0; the final state of the job if it must not start again."""
        make_directory(forge_dir(self.job.directory))
        before = self.take_over()
        if before is not None and before.ends_next_start:
            self.job.repeat_end(before)
            return self.job.state
        if before is not None and before.state is State.running:
            killed = Ending.of(-signal.SIGKILL)
            decision = self.decide(killed)
            if not decision.starts_again:
                because = (
                    "an earlier start did not record its end, which counts as a kill:"
                    f" {decision.because}"
                )
                self.job.end(killed, because)
                return self.job.state
        self.begin(before)
        return None

    @property
    def world(self) -> RankInfo:
        """The rank of this task, and the number of tasks."""
        return world.of(os.environ)

    @abstractmethod
    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """The reason why the job is being stopped, from the received signal and its exit code."""


class _OnSlurm(SubmittedJob):
    is_queue = True

    def __init__(self, task: SubmittedTask, place: _Place, policy: Policy) -> None:
        self._own = OwnJob(os.environ)
        name, self.command = self._own.name, self._own.command
        super().__init__(task, place(task.folder, name), policy, name, str(self._own.restarts))
        self._why: Why | None = None
        """The controller's answer; None before it was asked."""

    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """Queries Slurm, since a preemption and a cancellation send the same signals."""
        why = self._why = self._own.why()
        if received is signal.SIGINT and why not in (Why.requeued, Why.cancelled):
            return Reason.interrupted
        if why in IMPOSED:
            return IMPOSED[why]
        if received in (None, self.task.own_signal):
            return Reason.time_limit
        return Reason.signalled if received is signal.SIGTERM else Reason.requested

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has requeued the job already."""
        return self._why is Why.requeued

    def put_back(self, pause_s: float) -> None:
        """Raises SlurmError if Slurm refuses, or if the job was cancelled."""
        if self._why is None and self.why(None, int(ExitCode.REQUEUE)) is Reason.cancelled:
            raise NoSuchJob("it was cancelled")
        self._own.requeue()


class _OnThisMachine(SubmittedJob):
    def __init__(self, task: SubmittedTask, place: _Place, policy: Policy) -> None:
        from submitit.local import local

        start = str(os.getppid())  # submitit's controller, which never restarts an ended job
        job = task.job_id
        super().__init__(task, place(task.folder, job), policy, job, start)
        self.restart_code = local.LOCAL_REQUEUE_RETURN_CODE
        self._most = inspect.signature(local.Controller.run).parameters["max_retry"].default
        line = ["env", "SUBMITIT_EXECUTOR=local", f"SUBMITIT_LOCAL_JOB_ID={job}"]
        line += [sys.executable, "-m", of_submitit.SUBMIT_MODULE, os.environ["SUBMITIT_FOLDER"]]
        self.command = f"cd {shlex.quote(os.getcwd())} && {shlex.join(line)}"

    @property
    def world(self) -> RankInfo:
        """submitit starts all tasks on this machine, from one parent process."""
        rank, size, port = (
            self.task.rank,
            self.task.size,
            world.port_of("submitit", self.job.state.job),
        )
        return RankInfo(rank, size, rank, size, "127.0.0.1", port)

    def why(self, received: signal.Signals | None, code: int) -> Reason:
        """Derived from the exit code, which depends on the policy's action for the signal."""
        if code != ExitCode.REQUEUE:
            return Reason.interrupted if received is signal.SIGINT else Reason.cancelled
        is_limit = received in (None, self.task.own_signal)
        return Reason.time_limit if is_limit else Reason.requested

    def refusal(self, ending: Ending) -> str:
        """A message, since submitit's controller stops restarting without one."""
        text = f"submitit's LocalExecutor starts a job at most {self._most} times"
        return text if self.job.counts.restarts >= self._most else ""

    def put_back(self, pause_s: float) -> None:
        """submitit's controller starts the job again after `restart_code`."""


_Place = Callable[[Path, str], Path]


def current(place: _Place, policy: Policy) -> SubmittedJob | None:
    """The job of this process; None without submitit, or with its debug executor.

    Args:
        place: Returns the job's directory, from submitit's folder and the job's name.
        policy: The job's policy.
    """
    kinds = {"slurm": _OnSlurm, "local": _OnThisMachine}
    kind = kinds.get(os.environ.get("SUBMITIT_EXECUTOR", ""))
    if kind is None or "SUBMITIT_FOLDER" not in os.environ:
        return None
    import submitit

    return kind(SubmittedTask(submitit.JobEnvironment()), place, policy)
