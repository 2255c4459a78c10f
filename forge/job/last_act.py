"""A job without a wrapper: its outermost process of forge requeues it, as its last act.

That is rank 0 of a training, or a launcher with all its jobs. Everything is saved by then, and all
ranks have run their callbacks: a requeue by Slurm ends the process.
"""

from __future__ import annotations

from forge.job.backend import Backend
from forge.job.requeue import Decision
from forge.jobdir.job_state import JobState, State


class LastAct(Backend):
    """The common part of the backends of such jobs."""

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

    def begin(self, before: JobState | None) -> None:
        """Note that the job runs; `before`: what `take_over` has returned."""
        start = self.job.state.start
        is_noted = before is not None and before.start == start and not before.state.is_final
        if not is_noted:  # by another Run of this process
            self.job.begin_attempt()
            self.job.record_start()
        self.job.write(State.running, self.job.state.because)

    def of_this_start(self) -> JobState | None:
        """The state that this start of the job has written, perhaps in another task."""
        found, own = self.job.read(), self.job.state
        is_own = found is not None and (found.job, found.start) == (own.job, own.start)
        return found if is_own else None

    def start_again(self, decision: Decision) -> None:
        """Requeue the job. Raises SlurmError if that is refused."""
        because = decision.because
        self.job.record("requeue", because=because, restarts=self.job.counts.restarts)
        self.job.write(State.queued, because)  # before Slurm can end this process
        if not self.is_requeued:
            self.put_back(decision.pause_s)

    def put_back(self, pause_s: float) -> None:
        """Put the job into the queue, for a start in `pause_s` seconds."""
        raise NotImplementedError
