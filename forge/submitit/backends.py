"""The submitit backend that started this process (Slurm or local), and how it restarts the job.

submitit's own `_requeue` is not used: under Slurm it ignores why the job stopped, and tries once.
Under Slurm the job is like one of a batch script of the user's own, except that failures and rules
can restart it, too.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from forge import messages
from forge.compat import of_submitit
from forge.config.schema import Policy
from forge.errors import Reason
from forge.job.ending import Ending
from forge.job.job import Job, Trainings
from forge.job.last_act import LastAct
from forge.jobdir.job_files import write_atomically
from forge.jobdir.job_state import JobState, State
from forge.jobdir.plan import RequeueLimits
from forge.process import world
from forge.process.world import RankInfo
from forge.slurm import client
from forge.slurm.batch_job import BatchJob, Work

_LOOK_S = 0.05


class SubmittedTask:
    """A task of the job, as submitit describes it in this process."""

    def __init__(self, environment: Any) -> None:
        """`environment`: submitit's `JobEnvironment`."""
        self.rank, self.size = environment.global_rank, environment.num_tasks
        self.folder: Path = environment.paths.folder
        self.job_id: str = environment.job_id
        self.is_on_slurm = environment.cluster == "slurm"
        self.own_signal: signal.Signals = signal.Signals[f"SIG{environment.USR_SIG}"]
        self._result: Path = environment.paths.result_pickle

    @property
    def job(self) -> str:
        """The scheduler's name for the job."""
        return client.own_job(os.environ) if self.is_on_slurm else self.job_id

    @property
    def world(self) -> RankInfo:
        """The rank of this task, and the number of tasks."""
        if self.is_on_slurm:
            return world.of(os.environ)
        port = world.port_of("submitit", self.job_id)  # one process has started all tasks here
        return RankInfo(self.rank, self.size, self.rank, self.size, "127.0.0.1", port)

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


class _OnSlurm(BatchJob):
    refuses_starts = True

    @property
    def command(self) -> str:
        """The shell line that resumes the job."""
        return f"scontrol requeue {self.job.state.job}"

    def can_come_back(self, ending: Ending) -> bool:
        """Failures count as in a job below forge's wrapper."""
        return ending.reason is not Reason.cancelled


class _OnThisMachine(LastAct):
    def __init__(self, directory: Path, work: Work) -> None:
        from submitit.local import local

        # The start's name: submitit's controller, which never restarts an ended job.
        job, start = os.environ["SUBMITIT_LOCAL_JOB_ID"], str(os.getppid())
        state = JobState(state=State.queued, job=job, start=start, nodes=os.uname().nodename)
        super().__init__(Job(directory, work.limits, work.trainings, state, messages.warn))
        self.restart_code = local.LOCAL_REQUEUE_RETURN_CODE
        self._most = inspect.signature(local.Controller.run).parameters["max_retry"].default

    @property
    def command(self) -> str:
        """The shell line that resumes the job."""
        line = ["env", "SUBMITIT_EXECUTOR=local", f"SUBMITIT_LOCAL_JOB_ID={self.job.state.job}"]
        line += [sys.executable, "-m", of_submitit.SUBMIT_MODULE, os.environ["SUBMITIT_FOLDER"]]
        return f"cd {shlex.quote(os.getcwd())} && {shlex.join(line)}"

    def refusal(self, ending: Ending) -> str:
        """A message, since submitit's controller stops restarting without one."""
        text = f"submitit's LocalExecutor starts a job at most {self._most} times"
        return text if self.job.counts.restarts >= self._most else ""


def submitted_task() -> SubmittedTask | None:
    """The task of this process; None without submitit, or with its debug executor."""
    if os.environ.get("SUBMITIT_EXECUTOR") not in ("slurm", "local"):
        return None
    if "SUBMITIT_FOLDER" not in os.environ:
        return None
    import submitit

    return SubmittedTask(submitit.JobEnvironment())


def backend_of(task: SubmittedTask, directory: Path, policy: Policy) -> LastAct:
    """The backend of the task's job.

    Args:
        task: The task.
        directory: The job's directory.
        policy: The job's policy.
    """
    trainings = Trainings([directory], policy.checkpoint.dir, are_expected=True)
    work = Work(RequeueLimits.of(policy.requeue), policy.signal.warning_s, trainings)
    return (_OnSlurm if task.is_on_slurm else _OnThisMachine)(directory, work)
