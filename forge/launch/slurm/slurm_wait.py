"""Waits for submitted jobs, using the files that they write, and one squeue for all of them.

Neither needs Slurm's accounting. A job records its end in its own directory. If the cluster no
longer knows a job whose files do not record its end, the job counts as failed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from forge import messages
from forge.errors import Reason, SlurmRefused
from forge.jobdir import cancel_request
from forge.jobdir.job_state import JobState, State
from forge.launch.opening import handled
from forge.launch.progress.display import Display
from forge.launch.progress.observed import ObservedJob, Views
from forge.slurm import client, pending
from forge.slurm.job_info import IMPOSED, Stage, Why, cause_of, stage_of

_LOOK_S = 0.5
_LOOK_PER_JOB_S = 0.005
_ASK_S = 15.0
"""Seconds between two calls of squeue, however many jobs there are: one launcher runs a sweep."""
_PATIENCE = 4
"""Unanswered queries in a row before a warning is logged."""
_SILENCE_S = 10.0
"""A network disk can show a job's last files this much later than squeue shows its end."""


@dataclass
class SubmittedJob(ObservedJob):
    """A job on the cluster."""

    slurm_id: str = ""
    logs: Path | None = None
    """Folder with the output of the batch scripts."""
    _gone: float | None = None

    def is_own(self, content: JobState) -> bool:
        """Whether the state was written under this id of the job."""
        return self.slurm_id == content.job

    def take(self, content: JobState) -> None:
        """Update the state, and the reason if the job ended."""
        super().take(content)
        if self.state.is_final:
            self.reason, self.code = content.reason, content.code

    def learn(self, queued: client.Queued | None, now: float) -> None:
        """Update from squeue; None: squeue does not know the job."""
        if queued is not None and queued.is_alive:
            self._gone = None
            if stage_of(queued.state) is Stage.waiting:
                self.state, self.waits_for = State.queued, queued.waits_for
            else:
                self.waits_for = ""
            return
        if self._gone is None:
            self._gone = now
        elif now - self._gone > _SILENCE_S or (queued is not None and now - self._gone > 3):
            self.poll()
            if not self.state.is_final:
                self.vanish(queued)

    def is_cancelled(self, queued: client.Queued | None) -> bool:
        """Whether a person has cancelled the job, by `scancel` or `forge cancel`."""
        is_by_slurm = queued is not None and cause_of(queued.state) is Why.cancelled
        return is_by_slurm or cancel_request.read(self.directory) is not None

    def vanish(self, queued: client.Queued | None) -> None:
        """End the job, which has left the queue, without a record of its end."""
        is_cancelled = self.is_cancelled(queued)
        self.state = State.stopped if is_cancelled else State.failed
        cause = Why.cancelled if is_cancelled else cause_of(queued.state if queued else "")
        self.reason, self.code = IMPOSED.get(cause, Reason.crashed), 1
        said = "no longer knows the job" if queued is None else f"says {queued.state}"
        if queued is not None and queued.reason not in ("None", ""):
            said += f" ({queued.reason})"
        content = self.read_state()
        if content is not None and content.state is State.finished:
            self.state, self.because, self.code = State.finished, "finished", 0
            return
        if is_cancelled:  # while it waited in the queue, without a wrapper
            self.because = "cancelled"
            return
        self.because = f"Slurm {said}, and the job's directory has no record of how the job ended"
        found = self.logs.glob(f"{self.slurm_id}_0_log.*") if self.logs is not None else ()
        logs = [str(path) for path in sorted(found)]
        if logs:
            what = "the batch script's output" if content is not None else "did its setup fail?"
            self.because += f"; {what} {' '.join(logs)}"


class QueueWatcher:
    """Waits until every job has ended; a signal ends the waiting, not the jobs."""

    def __init__(
        self,
        jobs: list[SubmittedJob],
        progress: Any,
        title: str = "",
    ) -> None:
        """`title`: of the table."""
        self._jobs = jobs
        self._views = Views(jobs)
        self._title = title
        self._progress = progress
        self._received: list[int] = []
        self._told = pending.Told()
        self._question: threading.Thread | None = None
        self._answer: dict[str, client.Queued] | SlurmRefused | None = None
        self._asked = time.monotonic()
        self._refused = 0

    def run(self) -> int | None:
        """Returns the signal that ended the waiting, or None once every job has ended."""
        bell, self._bell = os.pipe()
        try:
            display = Display(mode=self._progress, title=self._title)
            with handled(self._on_signal), display as self._display:
                while not self._received and self.poll():
                    self._show()
                    # Poll, since a change of a file on another machine sends no event.
                    pause_s = _LOOK_S + _LOOK_PER_JOB_S * len(self._jobs)
                    select.select([bell], [], [], pause_s)
                self._show()
        finally:
            os.close(bell)
            os.close(self._bell)
        return self._received[0] if self._received else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        os.write(self._bell, b"!")

    def _show(self) -> None:
        self._display.update(self._views.now())

    def poll(self) -> bool:
        """Update all jobs; returns whether any of them has not ended."""
        waiting = [job for job in self._jobs if not job.state.is_final]
        for job in waiting:
            if self._received:
                return True  # do not wait for a slow disk
            job.poll()
        waiting = [job for job in waiting if not job.state.is_final]
        now = time.monotonic()
        answer, self._answer = self._answer, None
        if isinstance(answer, SlurmRefused):
            self._refused += 1
            if self._refused == _PATIENCE:  # not just a busy controller
                said = str(answer).splitlines()[-1]
                messages.warn(
                    f"The cluster does not answer: {said}. Until it answers, the state of the jobs"
                    " is read from their files only."
                )
        elif answer is not None:
            self._refused = 0
            for job in waiting:
                if job.taken <= self._asked:  # else the wrapper's state is newer than this answer
                    job.learn(answer.get(job.slurm_id), now)
            self._tell_pending(waiting)
        is_asking = self._question is not None and self._question.is_alive()
        if waiting and not is_asking and now - self._asked >= _ASK_S:
            self._asked = now
            self._question = threading.Thread(target=self._ask, name="forge-squeue", daemon=True)
            self._question.start()
        return bool(waiting)

    def _ask(self) -> None:
        """Runs in a thread, since a busy controller can take a minute, and Ctrl+C must not wait."""
        try:
            self._answer = client.queue()
        except SlurmRefused as error:
            self._answer = error

    def _tell_pending(self, waiting: list[SubmittedJob]) -> None:
        """Print why jobs wait, at each change; the table does not show the remedy."""
        reasons = [(job.number, job.slurm_id, job.waits_for) for job in waiting]
        for line, is_stuck in self._told.news(reasons):
            if is_stuck and self._progress == "none":
                messages.warn(line)
            elif is_stuck or not self._display.is_live:
                self._display.say(line, "yellow" if is_stuck else "")
