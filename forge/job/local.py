"""A job on one machine: `python -m forge.job.local [--parent PID] [--continue] <job directory>`.

The wrapper forks a supervisor for each rank, which inherits the lock on the job's directory. The
wrapper also enforces the time limit: it sends a signal before the limit, and kills the job at it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from pathlib import Path

from forge.errors import ExitCode, Reason
from forge.filesystem.files import exit_on_error
from forge.job.command import supervisor_of
from forge.job.requeue import Ending
from forge.job.wrapper import Job
from forge.jobdir import job_state
from forge.jobdir.job_files import RANK, RANKS, REPORT, TOKEN, output_of, read_json, suffix
from forge.jobdir.job_state import State
from forge.process import processes, stacks, time_limit, world
from forge.process.world import RankInfo

_TICK_S = 0.5
"""Seconds between two checks whether the process that started us still runs."""


class LocalJob(Job):
    """The wrapper of a job that was started by `hydra/launcher=local`."""

    def __init__(self, directory: Path, *, is_continued: bool, parent: int | None = None) -> None:
        super().__init__(directory)
        self._is_continued = is_continued
        # The starter passes its pid: if it is killed early, getppid() returns another process.
        self._parent = os.getppid() if parent is None else parent
        self._ranks: list[int] = []
        """pid of each rank's supervisor."""
        self._statuses: dict[int, int] = {}
        """pid -> wait status of the supervisors that have ended."""
        self._ended: dict[int, float] = {}
        """pid -> unix time at which it ended."""

    def _look_while_waiting(self) -> None:
        self._drain_signals()
        if os.getppid() != self._parent:
            sys.exit(int(ExitCode.TERMINATED))  # we have started nothing yet

    def _take_over(self) -> Ending | None:
        """End the processes of an earlier wrapper, and take over its requeue counts.

        Returns:
            The end of the attempt in which that wrapper was killed; None at a first start.
        """
        self._end_strays()
        state = job_state.read(self.directory)  # the launcher has removed those of earlier sweeps
        if state is not None and (state.state is State.finished or self._is_continued):
            self.counts = state.counts
            is_finished = state.state is State.finished or self._has_finished()
            return Ending.of(ExitCode.FINISHED if is_finished else -signal.SIGKILL)
        self.counts.best_step = self._saved_step()
        return None

    def _has_finished(self) -> bool:
        """Whether every rank of the last attempt has finished."""
        for rank in range(self.plan.tasks):
            report = read_json(self.forge / f"{REPORT}{suffix(rank)}")
            if report is None or not self._read_ending(report, rank).is_finished:
                return False
        return True

    # -- an attempt ----------------------------------------------------------------------------

    def _start(self, output: int) -> int:
        """Fork the supervisor of each rank, which starts its task."""
        environment = self._environment()
        environment |= time_limit.env_for_child(self.plan.time_limit_s, self.plan, environment)
        size = self.plan.tasks
        self._ranks, self._statuses, self._ended = [], {}, {}
        port = world.free_port() if size > 1 else 0
        is_one_of_many = int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1
        for rank in range(size):
            place = RankInfo(rank, size, rank, size, "127.0.0.1", port)
            own = {RANK: str(rank), **place.variables()} if size > 1 else {}
            if self.plan.exec is None or size > 1 or is_one_of_many:
                own[RANKS] = str(size)  # without it, a command can be srun, with tasks of its own
            log = output_of(self.directory, rank) if rank else output
            self._ranks.append(self._fork(environment | own, log))
            if rank:
                os.close(log)
        return self._ranks[0]

    def _fork(self, environment: dict[str, str], output: int) -> int:
        parent = os.getpid()
        pid = processes.fork()
        if pid:
            return pid
        code = 1
        try:
            task = self.plan.command
            code = supervisor_of(self.directory, self.plan, task, environment, output, parent).run()
        except BaseException as error:  # noqa: BLE001 - the process ends here in any case
            self._print(f"the supervisor failed: {error!r}")
        finally:
            os._exit(code)

    def _wait(self, child: int, began: float) -> int:
        """Wait for all ranks, enforce the time limit, pass on signals; the supervisor's status."""
        limit_s = math.inf if self.plan.time_limit_s is None else self.plan.time_limit_s
        self._is_limit_near = False
        leave_by = math.inf
        while not self._statuses.keys() >= set(self._ranks):
            for pid, one in processes.reap().items():
                self._statuses[pid], self._ended[pid] = one, time.time()
            if leave_by == math.inf and self._has_failed():
                leave_by = time.monotonic() + self._patience_s()
            if time.monotonic() > leave_by:
                self._end_the_others()
                leave_by = math.inf
            left_s = limit_s - (time.monotonic() - began)
            if left_s <= self.plan.warning_s and not self._is_limit_near:
                self._is_limit_near = True
                if self.plan.warning_s > 0:  # else the task has no handler for it
                    self._record("limit near", left_s=round(left_s, 1), signal=self.plan.signal)
                    self._send_all(signal.Signals[f"SIG{self.plan.signal}"])
            if left_s <= 0:
                self._record("limit")
                processes.kill_descendants()
                limit_s = math.inf
            next_s = left_s if self._is_limit_near else left_s - self.plan.warning_s
            select.select([self._reader], [], [], min(max(next_s, 0.001), _TICK_S))
            self._drain_signals()
            self._look_for_parent()
            self._look_for_hangs()
        return self._statuses[child]

    def _look_for_hangs(self) -> None:
        statuses = {rank: self._statuses.get(pid) for rank, pid in enumerate(self._ranks)}
        self.hangs.look({rank: one != 0 for rank, one in statuses.items() if one is not None})

    def _has_failed(self) -> bool:
        """Whether a rank has failed while other ranks are still running."""
        return any(self._statuses.get(pid, 0) for pid in self._ranks)

    def _end_the_others(self) -> None:
        """Kill the ranks that have not exited after another rank failed."""
        self._print(
            "ranks have not exited after another rank failed: printing their stacks, then SIGKILL"
        )
        stacks.show_all(processes.descendants(), self._reader)
        processes.kill_descendants()

    def _ending(self, status: int) -> Ending:
        ending = self._of_all([self._of_rank(rank, pid) for rank, pid in enumerate(self._ranks)])
        if ending.is_finished:
            return ending  # it had ended before it was signalled
        if self._asked is not None:
            return ending.imposed(self._asked)
        # Only ends that the limit explains: an error of the user's code now remains an error.
        signalled = 128 + signal.Signals[f"SIG{self.plan.signal}"]
        by_limit = (ExitCode.REQUEUE, ExitCode.FORCED, signalled)
        is_limit = ending.is_imposed or ending.code < 0 or ending.code in by_limit
        return ending.imposed(Reason.time_limit) if self._is_limit_near and is_limit else ending

    def _of_rank(self, rank: int, supervisor: int) -> tuple[float, Ending]:
        """Time and end of a rank; without a report, from its supervisor's wait status."""
        report = read_json(self.forge / f"{REPORT}{suffix(rank)}")
        if report is None:
            code = os.waitstatus_to_exitcode(self._statuses[supervisor])
            at = self._ended[supervisor]
            if code < 0:
                text = "its supervisor was killed"
                return at, Ending.of(-9, text=text, is_command=self._command is not None)
            report = {"code": code if code < 128 else 128 - code, "is_held": False, "time": at}
        return report["time"], self._read_ending(report, rank)

    # -- signals -------------------------------------------------------------------------------

    def _drain_signals(self) -> None:
        for number in processes.drain(self._reader):
            if number == signal.SIGQUIT:
                self._ask(Reason.interrupted, signal.SIGINT)
                processes.kill_descendants()
            elif number == signal.SIGINT:
                self._ask(Reason.interrupted, signal.SIGINT)
            elif number in (signal.SIGTERM, signal.SIGHUP):
                self._ask(Reason.cancelled, signal.SIGTERM)
            elif number in (signal.SIGUSR1, signal.SIGUSR2):
                self._send_all(number)

    def _look_for_parent(self) -> None:
        """Stop if the process that started us has ended."""
        if os.getppid() != self._parent:
            self._ask(Reason.orphaned, signal.SIGTERM)

    def _ask(self, reason: Reason, number: int) -> None:
        """Stop the task, which saves first, and do not restart it."""
        if self._asked is None:
            self._asked = reason
            self._write_state(State.stopping, reason.value)
            self._send_all(number)

    def _send_all(self, number: int) -> None:
        """Signal every process of the job, as Slurm does; a command only by its supervisor."""
        if self._command is not None:
            stops = number in (signal.SIGINT, signal.SIGTERM)
            number = signal.Signals[f"SIG{self.plan.signal}"] if stops else number
            for pid in set(self._ranks) - self._statuses.keys():
                processes.send(pid, number)
            return
        for pid in processes.descendants():
            # A sweep inside a job passes signals on itself: two would mean "exit immediately".
            is_ours = processes.variable(pid, TOKEN) in (None, self.plan.token)
            if is_ours and not processes.is_resource_tracker(pid):
                processes.send(pid, number)


@exit_on_error()
def main(arguments: list[str]) -> int:
    """`python -m forge.job.local [--parent PID] [--continue] <job directory>`."""
    parent = int(arguments[1]) if arguments[:1] == ["--parent"] else None
    arguments = arguments[0 if parent is None else 2 :]
    is_continued = arguments[:1] == ["--continue"]
    (directory,) = arguments[is_continued:]
    return LocalJob(Path(directory), is_continued=is_continued, parent=parent).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
