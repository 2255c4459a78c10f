"""The Slurm job in whose batch script the wrapper runs: its time limit, and why it is stopped.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping

from forge.errors import NoAnswer, NoSuchJob, SlurmError
from forge.filesystem.files import write_atomically
from forge.job import deadline
from forge.job.job import Job
from forge.jobdir.job_files import forge_dir
from forge.jobdir.plan import JobPlan
from forge.process import time_limit
from forge.slurm import client
from forge.slurm.job_info import JobInfo, Why

ASK_S = 10.0
"""Timeout for a question whose answer is not essential."""
_TICK_S = 1.0
LEAD_SLACK_S = 90.0
"""Slurm sends the signal before the time limit up to a minute earlier than requested."""
_RESTART_S = 60.0
"""The tasks are not restarted if less time than this is left before the time limit's signal."""
_LOOK_S = (10.0, 600.0)
"""Seconds between two checks of the time limit, which an administrator can change."""
_END_S = 15.0
"""Seconds before the end of the allocation in which a silent controller is no longer asked."""
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Allocation:
    """The Slurm job of this process, as of the controller's last answers."""

    def __init__(self, job: Job, plan: JobPlan, kill_wait_s: float) -> None:
        """`kill_wait_s`: Slurm's KillWait."""
        self._job, self._plan, self._kill_wait_s = job, plan, kill_wait_s
        self.name = job.state.job
        self.restarts = int(job.state.start)
        """Restarts by Slurm, as of this start."""
        self.info: JobInfo | None = None
        """The controller's last answer during this attempt."""
        self.why = Why.unknown
        """Why Slurm stops the job, by the controller's last answer during this attempt."""
        self.is_ending = False
        """Whether Slurm has begun to end the job: the batch script has received a signal, too."""
        self.is_by_hand = False
        """Whether a person, not Slurm, has signalled the batch script to end."""
        self.has_news = False
        """Whether the job has begun to end since the controller was asked."""
        self._end: float | None = None
        """The time limit, by the monotonic clock; None without a limit."""
        self._next_look = 0.0
        self._batch_shell = os.getppid()

    def begin_attempt(self) -> None:
        """Forget the answers of the last attempt, and ask for the time that is left."""
        self.why, self.info, self.is_by_hand = Why.unknown, None, False
        left_s = self._ask_left_s()
        self._end = None if left_s is None else time.monotonic() + left_s
        (forge_dir(self._job.directory) / time_limit.MOVED).unlink(missing_ok=True)
        self._plan_next_look()

    def receive(self, number: int) -> None:
        """Take note of a signal to the batch script."""
        if number in _STOPS and not self.is_ending:
            self.is_ending = self.has_news = True

    # -- the time limit ------------------------------------------------------------------------

    def _ask_left_s(self) -> float | None:
        """Seconds until the time limit; None without a limit."""
        try:
            return client.show(self.name, ASK_S).left_s
        except SlurmError as error:
            self._job.say(
                f"{error}; so the time left is unknown, and forge assumes that the job's time limit"
                " begins now"
            )
            return self._plan.time_limit_s

    def left_s(self) -> float | None:
        """Seconds until the time limit; None if there is none, or it is unknown."""
        if self.why is Why.requeued:
            return None  # the controller's answer is about the next start
        return None if self._end is None else self._end - time.monotonic()

    def is_limit_near(self) -> bool:
        """Whether the signal before the time limit can have been sent."""
        left_s = self.left_s()
        return left_s is not None and left_s <= self._plan.warning_s + LEAD_SLACK_S

    def lasts(self) -> bool:
        """Whether the tasks can be restarted in it: Slurm does not end it, and time is left."""
        if self.is_ending or self.why is not Why.unknown:
            return False
        left_s = self.left_s()
        return left_s is None or left_s > self._plan.warning_s + LEAD_SLACK_S + _RESTART_S

    def look_at_limit(self) -> None:
        """Check from time to time, more often near the end, whether the time limit was changed."""
        before = self.left_s()
        if before is None or time.monotonic() < self._next_look:
            return
        # A full disk must not end the job; the next check retries.
        with contextlib.suppress(SlurmError, OSError):
            info = client.show(self.name, _TICK_S)
            if info.left_s is not None and not info.has_ended and abs(info.left_s - before) > 5:
                self._end = time.monotonic() + info.left_s
                (end,) = self.end_time(os.environ).values()
                write_atomically(forge_dir(self._job.directory) / time_limit.MOVED, end)
                moved = {"left_s": info.left_s, "before_s": round(before, 1)}
                self._job.record("time limit moved", **moved)
        self._plan_next_look()

    def end_time(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variable with the end time of the tasks; the one that Slurm sets can be outdated."""
        others = {k: v for k, v in environment.items() if k != time_limit.SLURM_END_TIME}
        return deadline.env_for_child(self.left_s(), self._plan, others)

    def _plan_next_look(self) -> None:
        until_s = (self.left_s() or 0.0) - self._plan.warning_s
        self._next_look = time.monotonic() + min(max(until_s / 4, _LOOK_S[0]), _LOOK_S[1])

    # -- questions to the controller -----------------------------------------------------------

    def ask(self) -> None:
        """Ask why Slurm stops the job; if the controller does not answer, a message says so."""
        self.has_news = False
        try:
            self.learn(self.asking_s())
        except NoAnswer as error:
            self._job.say(f"cannot ask the controller why the job is stopped: {error}")
            self._record_why(is_answered=False)

    def learn(self, within_s: float) -> None:
        """Ask why Slurm stops the job. Raises NoAnswer."""
        try:
            self.info = client.show(self.name, within_s)
            self.why = client.why(self.info, self.restarts, within_s)
        except NoSuchJob:
            self.why = Why.cancelled  # without a job there is nothing to requeue
        else:
            if self.why is Why.cancelled and os.getppid() != self._batch_shell:
                self.why = Why.script_killed
            if self.why in (Why.unknown, Why.preempted) and not self.info.has_ended:
                self.is_by_hand |= self.is_ending and self.why is Why.unknown
                self.is_ending = False
            left_s = self.info.left_s
            self._end = None if left_s is None else time.monotonic() + left_s
        self._record_why(is_answered=True)

    def _record_why(self, *, is_answered: bool) -> None:
        answer = {"answer": self.why.name, "left_s": self.left_s(), "is_answered": is_answered}
        self._job.record("why", **answer)

    def patience_s(self) -> float:
        """Seconds for tasks to exit, once Slurm ends the job.

        After KillWait no process is left that could requeue it.
        """
        return max(self._kill_wait_s * 0.6, self._kill_wait_s - 5.0)

    def asking_s(self) -> float:
        """Timeout for a question now: the seconds that the end of the job needs are reserved."""
        if self.is_ending:
            return self.patience_s() / 2
        left_s = self.left_s()
        return 6 * ASK_S if left_s is None else min(max(left_s - _END_S, ASK_S), 6 * ASK_S)

    def insist(self, ask: Callable[[float], None], look: Callable[[], None]) -> None:
        """Retry until there is an answer, or the allocation is about to end.

        Args:
            ask: Asks, with a timeout.
            look: Takes note of signals to the batch script.
        Raises:
            NoAnswer: The error of the last try.
        """
        while True:
            try:
                return ask(self.asking_s())
            except NoAnswer as error:
                look()
                left_s = self.left_s()
                if self.is_ending or (left_s is not None and left_s < _END_S):
                    raise
                self._job.say(
                    f"Slurm's controller does not answer; forge asks again until the job's time"
                    f" limit: {error}"
                )

    def has_lost_node(self) -> bool:
        """Whether the controller reports a node of the job as down or not responding."""
        nodes = self._job.state.nodes
        with contextlib.suppress(NoAnswer):
            return bool(nodes and client.lost_nodes(nodes, self.asking_s()))
        return False
