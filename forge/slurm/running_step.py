"""The step of a Slurm job that runs a task on all ranks: srun, signals, and the ranks' ends.

Standard library only.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from forge.errors import ExitCode, NoAnswer
from forge.job.ending import signal_name
from forge.job.job import Job
from forge.job.task import Ended, Task
from forge.jobdir import rank_report
from forge.jobdir.job_files import OUTPUT, forge_dir
from forge.jobdir.plan import SlurmPlan
from forge.jobdir.rank_report import RankReport
from forge.process import children, processes
from forge.slurm import client, step
from forge.slurm.allocation import ASK_S

_SRUN_S = 15.0
"""Seconds for srun to end after its tasks have ended."""


class RunningStep:
    """The steps of this start of the job, one after the other."""

    def __init__(self, job: Job, plan: SlurmPlan) -> None:
        self._job, self._plan = job, plan
        self.number = -1
        """Number of the last step, as Slurm counts them in each start of the job."""
        self.reports: Sequence[RankReport | None] = [None] * plan.ranks
        """The report of each rank's supervisor, as of the last look."""
        self.received: list[int] = []
        """Signals to the batch script that the tasks have not received yet."""
        self._srun = 0
        self._status: int | None = None
        self._exit_by = math.inf
        """Monotonic time at which srun is ended."""
        self._is_killed = False

    def continue_at(self, number: int) -> None:
        """Count on from the last step of a wrapper that was killed."""
        self.number = number

    def start(self, task: Task, environment: dict[str, str], output: int) -> None:
        """Start the next step."""
        for path in forge_dir(task.directory).glob(f"{step.EARLY}*"):
            path.unlink()
        self.received.clear()
        self.reports = [None] * self._plan.ranks
        self.number += 1
        self._status, self._exit_by, self._is_killed = None, math.inf, False
        log = str(task.directory / OUTPUT)
        command = step.command(task.directory, self._plan.start)
        # srun gets a session of its own, since `scancel --full` signals our process group, and
        # srun kills the tasks on SIGTERM. `children.reap` collects every child, Popen need not.
        self._popen = subprocess.Popen(
            client.srun(self._plan.srun_args, log, command),
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self._srun = self._popen.pid

    def has_ended(self) -> bool:
        """Whether srun has ended; collects every child that has ended."""
        if self._status is None:
            self._status = children.reap().get(self._srun)
        return self._status is not None

    def look(self) -> None:
        """Read the reports of the ranks that have ended."""
        directory, ranks = self._job.directory, range(self._plan.ranks)
        self.reports = [self.reports[rank] or rank_report.read(directory, rank) for rank in ranks]

    def ended_ranks(self) -> dict[int, bool]:
        """Rank that has reported its end -> whether it failed."""
        ended = ((rank, one) for rank, one in enumerate(self.reports) if one is not None)
        return {rank: one.code != 0 for rank, one in ended}

    def allow(self, seconds: float) -> None:
        """End srun after so many seconds, if it does not end before."""
        self._exit_by = min(self._exit_by, time.monotonic() + seconds)

    def tick(self, patience_s: float, *, is_last: bool) -> None:
        """End srun if it outlives its tasks, or if tasks outlive a failed one.

        Args:
            patience_s: Seconds for the other tasks to exit, once a task has failed.
            is_last: Whether Slurm ends the job.
        """
        is_over = all(one is not None for one in self.reports)
        if self._exit_by == math.inf and (is_over or any(self.ended_ranks().values())):
            self.allow(_SRUN_S if is_over else patience_s)
        if time.monotonic() > self._exit_by:
            self._job.say("tasks have not exited in time: killing them")
            # srun kills its step on SIGTERM. Not scancel, which could now cancel a job that Slurm
            # has just requeued. If Slurm ends the job, it kills the step itself.
            number = signal.SIGKILL if is_last or self._is_killed else signal.SIGTERM
            processes.send(self._srun, number)
            self._exit_by = time.monotonic() + self._plan.kill_wait_s + ASK_S
            self._is_killed = True

    def pass_on(self) -> None:
        """Pass the signals on to the tasks that `scancel --full` has sent to the script alone."""
        while self.received:
            name = signal_name(self.received[0])
            try:
                if not client.signal_step(self._job.state.job, self.number, name, ASK_S):
                    return  # the step does not exist yet
            except NoAnswer as error:
                return self._job.say(f"could not pass {name} on to the tasks yet: {error}")
            self._job.record("passed on", signal=name)
            del self.received[0]

    def end(self) -> None:
        """End the last step, so that none of its processes is left when the next step begins."""
        try:
            client.end_step(self._job.state.job, self.number, ASK_S)
        except NoAnswer as error:
            self._job.say(str(error))

    # -- how it ended --------------------------------------------------------------------------

    def ends(self, task: Task, *, has_begun: bool) -> list[Ended]:
        """The end of each rank; for a rank without a report, from srun's wait status.

        `has_begun`: whether any task has begun.
        """
        without = self._without_report(task, has_begun=has_begun)
        reports = enumerate(self.reports)
        return [without if one is None else task.end_of(one, rank) for rank, one in reports]

    def _without_report(self, task: Task, *, has_begun: bool) -> Ended:
        assert self._status is not None
        code = self._code_by_srun(task, self._status)
        text = "its supervisor was killed" if code < 0 and not has_begun else ""
        return math.inf, task.end_without_report(code, text)

    def _code_by_srun(self, task: Task, status: int) -> int:
        """The exit code of a rank without a report.

        A signal in the first instant of the task, before a handler was set, has the effect that
        the policy gives to this signal.
        """
        code = os.waitstatus_to_exitcode(status)
        if code > 128 and signal_name(code - 128).startswith("SIG"):
            action = task.plan.actions.get(signal_name(code - 128).removeprefix("SIG"))
            if action == "requeue":
                return int(ExitCode.REQUEUE)
            return code if action == "stop" else 128 - code
        return code if code > 0 else -signal.SIGKILL
