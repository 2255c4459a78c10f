"""A job without a wrapper: its outermost process of forge requeues it, as its last act.

That is rank 0 of a training, or a launcher with all its jobs. Everything is saved by then, and all
ranks have run their callbacks: a requeue by Slurm ends the process.

    asks why the job ends ─► budgets ─► notes the decision ─► requeues the job, or ends it
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from forge import messages
from forge.errors import ExitCode, Reason, SlurmError
from forge.job.backend import Backend
from forge.job.ending import Ending
from forge.job.job import Job
from forge.job.requeue import Decision
from forge.jobdir import verdict
from forge.jobdir.job_state import JobState, State


class LastAct(Backend, ABC):
    """The common part of the backends of such jobs; a `stopping.Requeuer`."""

    restart_code = int(ExitCode.REQUEUE)
    """The exit code of a process whose job starts again."""
    refuses_starts = False
    """Whether the next start of a job that was given up ends at once, if Slurm has requeued the job
    nevertheless; else that requeue stands."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.starts_again = False
        """Whether the job was requeued; if not, `job.state` has the reason of its end."""
        self._deciding = threading.Lock()
        self.exit_code: int | None = None
        """The exit code from the last act; None before it."""

    @property
    @abstractmethod
    def command(self) -> str:
        """The shell command that starts the job again by hand."""

    def explain(self, ending: Ending) -> Ending:
        """The end, with its reason if the scheduler or a person has ended the job.

        Raises:
            SlurmError: If Slurm does not answer.
        """
        return ending

    def put_back(self, pause_s: float) -> None:
        """Requeue the job, for a start in `pause_s` seconds. Raises SlurmError if refused."""

    # -- the start -----------------------------------------------------------------------------

    def take_over(self) -> JobState | None:
        """Continue with the budgets of an earlier start of this job.

        A job that had ended, and that a person has requeued, has new budgets.

        Returns:
            The state of that start; None if this is the first one.
        """
        before = self.job.read()
        if before is not None and before.job != self.job.state.job:
            before = None
        has_ended = before is None or (before.state.is_final and not before.ends_next_start)
        self.job.set_budgets(None if has_ended else before)
        return before

    def note_start(self, before: JobState | None) -> None:
        """Note that the job runs; `before`: the result of `take_over`."""
        own = self.job.state
        is_noted = before is not None and before.is_of_same_process(own)
        if not is_noted:  # by another Run of this process
            self.job.begin_attempt()
            self.job.record_start()
        self.job.write(State.running, own.because)

    def of_this_start(self) -> JobState | None:
        """The state that this start of the job has written, perhaps in another task."""
        found, own = self.job.read(), self.job.state
        is_own = found is not None and (found.job, found.start) == (own.job, own.start)
        return found if is_own else None

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """The job has finished: from now on, no other thread can decide about it."""
        self._deciding.acquire()  # blocks forever if another thread is ending this process
        finished = Ending.of(ExitCode.FINISHED)
        self.job.record_end(finished)
        self.job.end(finished, finished.text)

    def requeue(self, code: int, reason: Reason) -> int:
        """See `stopping.Requeuer`."""
        return self.settle(Ending.of(code, reason))

    def settle(self, ending: Ending, before_requeue: Callable[[], object] = lambda: None) -> int:
        """Requeue the job if the limits allow it; only once, by the first thread that gets here.

        Args:
            ending: The end of this process, as far as it knows.
            before_requeue: Called before the requeue, which can end this process.
        Returns:
            The exit code of the process.
        """
        with self._deciding:
            if self.exit_code is None:
                self.exit_code = self._settle(ending, before_requeue)
            return self.exit_code

    def _settle(self, ending: Ending, before_requeue: Callable[[], object]) -> int:
        job = self.job
        job.end_attempt()
        try:
            ending = self.explain(ending) if job.limits.enabled else ending
            job.record_end(ending)
            decision = self.decide(ending)
            if self.is_requeued and not self.refuses_starts:
                decision = Decision(starts_again=True, because=ending.text)
            if decision.starts_again:
                before_requeue()
                return self._start_again(ending, decision)
        except SlurmError as error:
            return self._end(ending, "could not be", str(error), logging.ERROR)
        return self._end(ending, "is not", decision.because)

    def _start_again(self, ending: Ending, decision: Decision) -> int:
        job, because = self.job, decision.because
        job.record("requeue", because=because, restarts=job.counts.restarts)
        job.write(State.queued, because)  # before Slurm can end this process
        if not self.is_requeued:
            self.put_back(decision.pause_s)
        self.starts_again = True
        self._judge(f"requeued: {because}", int(ExitCode.REQUEUE), ending.reason)
        messages.say(f"Requeued job {job.state.job}: {because}")
        return self.restart_code

    def _end(self, ending: Ending, how: str, because: str, level: int = logging.INFO) -> int:
        is_requeued = self.is_requeued and self.job.limits.enabled
        self.job.end(ending, because, is_requeued=is_requeued)
        text = f"{self.job.state.job} {how} requeued: {because}"
        self._judge(f"job {text}", ending.exit_code)
        messages.say(f"Job {text}. To resume it:\n  {self.command}", level)
        return ending.exit_code

    def _judge(self, text: str, code: int, reason: Reason | None = None) -> None:
        """Add the text to the verdict that the Run has written."""
        directory = self.job.directory
        said = verdict.read(directory)
        if said is not None and said.pid == os.getpid():
            reason, text = reason or said.reason, f"{said.text}; {text}"
            verdict.write(directory, replace(said, reason=reason, text=text, exit_code=code))
