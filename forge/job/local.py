"""A job on one machine: `python -m forge.job.local [--parent PID] [--continue] <job directory>`.

The wrapper forks a supervisor for each rank, which inherits the lock on the job's directory. The
backend also enforces the time limit: it sends a signal before the limit, and kills the job at it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

from forge.errors import ExitCode, Reason
from forge.filesystem.files import exit_on_error
from forge.job import deadline
from forge.job.backend import TaskBackend
from forge.job.ending import Ending
from forge.job.job import Job
from forge.job.task import Ended, Task
from forge.job.wrapper import Wrapper, job_of, patience_s
from forge.jobdir import plan as plan_file
from forge.jobdir import rank_report
from forge.jobdir.job_files import RANK, TOKEN, output_of
from forge.jobdir.job_state import State
from forge.jobdir.plan import JobPlan
from forge.jobdir.rank_report import RankReport
from forge.process import children, processes, stacks, world
from forge.process.world import RankInfo

_TICK_S = 0.5
"""Seconds between two checks whether the process that started us still runs."""
_STOPS = {
    signal.SIGINT: (Reason.interrupted, signal.SIGINT),
    signal.SIGQUIT: (Reason.interrupted, signal.SIGINT),
    signal.SIGTERM: (Reason.cancelled, signal.SIGTERM),
    signal.SIGHUP: (Reason.cancelled, signal.SIGTERM),
}
"""Signal to the wrapper -> why the job stops, and the signal that its processes get."""


class LocalBackend(TaskBackend):
    """Tasks on this machine, started by `hydra/launcher=local`."""

    def __init__(
        self, job: Job, plan: JobPlan, *, is_continued: bool, parent: int | None = None
    ) -> None:
        super().__init__(job)
        self._plan = plan
        self._is_continued = is_continued
        # The starter passes its pid: if it is killed early, getppid() returns another process.
        self._parent = os.getppid() if parent is None else parent
        self._task = Task.of(job.directory, plan)
        self._ranks: list[int] = []
        """pid of each rank's supervisor."""
        self._statuses: dict[int, int] = {}
        """pid -> wait status of the supervisors that have ended."""
        self._ended: dict[int, float] = {}
        """pid -> unix time at which it ended."""
        self._limit = self._exit_by = math.inf
        """Monotonic times: the time limit, and when all ranks must have exited."""
        self._is_limit_near = False

    def take_over(self) -> Ending | None:
        """Continue with the budgets of a wrapper that was killed."""
        before = self.job.read()  # the launcher has removed those of earlier sweeps
        if before is None or not (before.state is State.finished or self._is_continued):
            self.job.set_budgets(None)
            return None
        self.job.set_budgets(before)
        is_finished = before.state is State.finished or self._has_finished()
        return Ending.of(ExitCode.FINISHED if is_finished else -signal.SIGKILL)

    def _has_finished(self) -> bool:
        """Whether every rank of the last attempt has finished."""
        if self.job.counts.recovery is not None:
            return False  # the reports are of the rule's recovery command, or of a failed attempt
        reports = rank_report.read_all(self.job.directory, self._plan.tasks)
        return all(
            report is not None and self._task.end_of(report, rank)[1].is_finished
            for rank, report in enumerate(reports)
        )

    # -- an attempt ----------------------------------------------------------------------------

    def start(self, task: Task, environment: dict[str, str], output: int) -> None:
        """Fork the supervisor of each rank, which starts its task."""
        plan, self._task = self._plan, task
        environment = environment | deadline.env_for_child(plan.time_limit_s, plan, environment)
        self._ranks, self._statuses, self._ended = [], {}, {}
        limit_s = math.inf if plan.time_limit_s is None else plan.time_limit_s
        self._limit, self._exit_by = time.monotonic() + limit_s, math.inf
        self._is_limit_near = False
        size = plan.tasks
        port = world.free_port() if size > 1 else 0
        for rank in range(size):
            place = RankInfo(rank, size, rank, size, "127.0.0.1", port)
            own = {RANK: str(rank), **place.variables()} if size > 1 else {}
            own |= task.rank_variables(size, environment)
            log = output_of(self.job.directory, rank) if rank else output
            self._ranks.append(self._fork(rank, environment | own, log))
            if rank:
                os.close(log)

    def _fork(self, rank: int, environment: dict[str, str], output: int) -> int:
        parent = os.getpid()
        pid = children.fork()
        if pid:
            return pid
        code = 1
        try:
            task = self._task.of_rank(rank)
            code = task.supervisor(rank, environment, output, parent).run()
        except BaseException as error:  # noqa: BLE001 - the process ends here in any case
            self.job.say(f"the supervisor failed: {error!r}")
        finally:
            os._exit(code)

    def has_ended(self) -> bool:
        """Whether the supervisors of all ranks have ended."""
        if not self._statuses.keys() >= set(self._ranks):
            for pid, status in children.reap().items():
                self._statuses[pid], self._ended[pid] = status, time.time()
        return self._statuses.keys() >= set(self._ranks)

    def ended_ranks(self) -> dict[int, bool]:
        """The ranks whose supervisor has ended."""
        statuses = {rank: self._statuses.get(pid) for rank, pid in enumerate(self._ranks)}
        return {rank: status != 0 for rank, status in statuses.items() if status is not None}

    def tick(self) -> float:
        """End ranks that outlive a failed one, and enforce the time limit."""
        now = time.monotonic()
        if self._exit_by == math.inf and any(self.ended_ranks().values()):
            self._exit_by = now + patience_s(self._plan)
        if now > self._exit_by:
            self._end_the_others()
            self._exit_by = math.inf
        left_s = self._limit - now
        if left_s <= self._plan.warning_s and not self._is_limit_near:
            self._is_limit_near = True
            if self._plan.warning_s > 0:  # else the task has no handler for it
                number = signal.Signals[f"SIG{self._plan.signal}"]
                self.job.record("limit near", left_s=round(left_s, 1), signal=self._plan.signal)
                self._send_all(number)
        if left_s <= 0:
            self.job.record("limit")
            processes.kill_descendants()
            self._limit = left_s = math.inf
        next_s = left_s if self._is_limit_near else left_s - self._plan.warning_s
        return min(max(next_s, 0.001), _TICK_S)

    def _end_the_others(self) -> None:
        """Kill the ranks that have not exited after another rank failed."""
        self.job.say(
            "ranks have not exited after another rank failed: printing their stacks, then SIGKILL"
        )
        stacks.show_all(processes.descendants(), self.reader)
        processes.kill_descendants()

    def ending(self) -> Ending:
        """The end of the rank that failed first, unless a stop or the time limit explains it."""
        ends = [self._end_of(rank, pid) for rank, pid in enumerate(self._ranks)]
        ending = self.first_end(self._task, ends)
        if ending.is_finished:
            return ending  # it had ended before it was signalled
        if self.stopped_by is not None:
            return ending.imposed(self.stopped_by)
        # Only ends that the limit explains: an error of the user's code now remains an error.
        signalled = 128 + signal.Signals[f"SIG{self._plan.signal}"]
        by_limit = (ExitCode.REQUEUE, ExitCode.FORCED, signalled)
        is_limit = ending.is_imposed or ending.code < 0 or ending.code in by_limit
        return ending.imposed(Reason.time_limit) if self._is_limit_near and is_limit else ending

    def _end_of(self, rank: int, supervisor: int) -> Ended:
        """The end of a rank; without a report, from its supervisor's wait status."""
        report = rank_report.read(self.job.directory, rank)
        if report is not None:
            return self._task.end_of(report, rank)
        code, at = os.waitstatus_to_exitcode(self._statuses[supervisor]), self._ended[supervisor]
        if code >= 0:
            report = RankReport(code=code if code < 128 else 128 - code, time=at)
            return self._task.end_of(report, rank)
        text = "its supervisor was killed"
        return at, self._task.end_without_report(-signal.SIGKILL, text)

    # -- signals -------------------------------------------------------------------------------

    def receive(self, number: int) -> None:
        """Stop the job, or pass a signal of a time limit on."""
        if number in _STOPS:
            self._stop(*_STOPS[signal.Signals(number)])
            if number == signal.SIGQUIT:
                processes.kill_descendants()
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._send_all(number)

    def cancel(self, *, is_now: bool) -> None:
        """Stop the tasks as SIGTERM to the wrapper does, or kill them."""
        if is_now:
            self.stopped_by = Reason.cancelled
            processes.kill_descendants()
        else:
            self._stop(Reason.cancelled, signal.SIGTERM)

    def look(self) -> None:
        """Also stop if the process that started us has ended."""
        super().look()
        if os.getppid() != self._parent:
            self._stop(Reason.orphaned, signal.SIGTERM)

    def _stop(self, reason: Reason, number: int) -> None:
        """Stop the task, which saves first, and do not restart it."""
        if self.stopped_by is None:
            self.stopped_by = reason
            self._send_all(number)

    def _send_all(self, number: int) -> None:
        """Signal every process of the job, as Slurm does; a command only by its supervisor."""
        if not self._task.is_main:
            number = self._task.stop_signal(number)
            for pid in set(self._ranks) - self._statuses.keys():
                processes.send(pid, number)
            return
        for pid in processes.descendants():
            # A sweep inside a job passes signals on itself: two would mean "exit immediately".
            is_ours = processes.variable(pid, TOKEN) in (None, self._plan.token)
            if is_ours and not processes.is_resource_tracker(pid):
                processes.send(pid, number)


@exit_on_error()
def main(arguments: list[str]) -> int:
    """`python -m forge.job.local [--parent PID] [--continue] <job directory>`."""
    parent = int(arguments[1]) if arguments[:1] == ["--parent"] else None
    arguments = arguments[0 if parent is None else 2 :]
    is_continued = arguments[:1] == ["--continue"]
    (directory,) = map(Path, arguments[is_continued:])
    return run(directory, is_continued=is_continued, parent=parent)


def run(directory: Path, *, is_continued: bool = False, parent: int | None = None) -> int:
    """Run the job in a directory; returns its exit code.

    Args:
        directory: The job's directory.
        is_continued: Whether an earlier wrapper of the same launcher was killed.
        parent: pid of the process that starts the job; None: the parent of this process.
    """
    plan = plan_file.read(directory)
    job = job_of(directory, plan, nodes=os.uname().nodename)
    backend = LocalBackend(job, plan, is_continued=is_continued, parent=parent)
    return Wrapper(plan, backend).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
