"""The machine or the scheduler that runs a job, as far as the job depends on it.

    forge/job/local.py              tasks of this machine
    forge/slurm/wrapper.py          a step of a Slurm job, below forge's own batch script
    forge/slurm/batch_job.py        a batch script of the user's own: no process above the training
    forge/submitit/backends.py      plain submitit: the same

A `Backend` knows why the job is ended from outside, and starts it again. The first two start tasks
as well, below the wrapper of forge's launchers (`TaskBackend`). In the others the training itself
requeues the job as its last act (`last_act.py`).
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy

from forge.errors import Reason
from forge.job.ending import Ending
from forge.job.job import Job
from forge.job.requeue import Decision, decide_restart, spread
from forge.job.task import Ended, Task
from forge.jobdir.job_files import OUTPUT, suffix
from forge.process import children


class Backend:
    """The causes that end a job from outside, and its return, in one start of the job."""

    is_queue = False
    """Whether the job waits in a queue before it starts again, and can be ended by others."""

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def is_requeued(self) -> bool:
        """Whether the job is in the queue again already, whatever is decided here."""
        return False

    def refusal(self, ending: Ending) -> str:
        """Why the job cannot start again after this end, whatever its limits; empty if it can."""
        return ""

    def is_cut_short(self) -> bool:
        """Whether the attempt ended before it could save anything, if others have ended it."""
        job = self.job
        return self.is_queue and not job.trainings.has_stepped(job.state.began)

    def decide(self, ending: Ending) -> Decision:
        """Whether the job starts again: the limits allow it, and the backend can do it."""
        job = self.job
        before = deepcopy(job.counts)
        decision = decide_restart(
            ending,
            job.counts,
            job.limits,
            job.trainings.saved_step(),
            has_run=job.trainings.count_progress(),
            is_cut_short=job.state.has_steps and self.is_cut_short(),
            took_s=job.took_s,
        )
        refusal = self.refusal(ending) if decision.starts_again else ""
        if refusal:
            job.set_counts(before)
            return Decision(starts_again=False, because=f"{decision.because}; {refusal}")
        has_saved = job.counts.no_progress + job.counts.early_evictions == 0
        job.counts.unsaved_s = 0.0 if has_saved else job.took_s
        return spread(decision, str(job.directory), job.counts.restarts)


class TaskBackend(Backend, ABC):
    """A backend that starts tasks; the wrapper drives it (`wrapper.py`)."""

    stopped_by: Reason | None = None
    """Why the job was asked to stop, if it is not to start again; None: it was not asked."""
    reader = -1
    """A descriptor that becomes readable with each signal, such as a child's end."""

    def listen(self) -> None:
        """From now on, receive signals through `reader`."""
        names = ("TERM", "HUP", "INT", "QUIT", "USR1", "USR2", "CHLD")
        self.reader = children.listen(signal.Signals[f"SIG{name}"] for name in names)

    def look(self) -> None:
        """Take note of signals; called often, also while no task runs."""
        for number in children.drain(self.reader):
            self.receive(number)

    @abstractmethod
    def receive(self, number: int) -> None:
        """Take note of a signal to this process."""

    @abstractmethod
    def cancel(self, *, is_now: bool) -> None:
        """Stop the tasks, and do not start the job again; sets `stopped_by`.

        Args:
            is_now: Whether to kill the tasks, without time to save.
        """

    @abstractmethod
    def take_over(self) -> Ending | None:
        """Continue with the budgets of an earlier start; the end of its attempt, if any."""

    def prepare(self) -> None:
        """Called before each attempt; can end this process, if the job starts elsewhere."""

    @abstractmethod
    def start(self, task: Task, environment: dict[str, str], output: int) -> None:
        """Start a task on all ranks; rank 0 writes into the descriptor `output`."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether all tasks have ended; collects every child that has ended."""

    @abstractmethod
    def ended_ranks(self) -> dict[int, bool]:
        """Rank that has ended -> whether it failed."""

    @abstractmethod
    def tick(self) -> float:
        """Act on signals, the clock, and the ranks that have ended, while tasks run.

        Returns:
            Seconds until the next call, at most.
        """

    def first_end(self, task: Task, ends: Sequence[Ended]) -> Ending:
        """The end of the rank that failed first; names the rank in the job's output."""
        ending = task.first_end(ends)
        if ending.rank:  # the output of rank 0 does not show the cause
            what = f"rank {ending.rank} of {len(ends)}: {ending.text}"
            self.job.say(f"{what}; its output is in {OUTPUT}{suffix(ending.rank)}")
        return ending

    @abstractmethod
    def ending(self) -> Ending:
        """How and why the task has ended, once all of its processes have."""

    def restart_elsewhere(self, ending: Ending, decision: Decision) -> int | None:
        """Start the job again elsewhere: the exit code of this process; None to start it here."""
        return None
