"""A job as its launcher sees it, from the small files that the job's wrapper and task write."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge.errors import Reason
from forge.jobdir import job_state
from forge.jobdir.job_files import STATE, forge_dir
from forge.jobdir.job_state import JobState, State
from forge.sweeps import reader
from forge.sweeps.job import SweepJob
from forge.sweeps.liveness import HeldLocks
from forge.sweeps.reader import JobPlace

_READ_S = 1.0

_WORDS: dict[Reason | None, str] = {Reason.cancelled: "cancelled", Reason.halted: "halted"}
"""Reasons to show instead of the job's state, since the user might not want the job to restart."""


@dataclass
class ObservedJob(ABC):
    """A job of the batch, from the queue to its end."""

    number: int
    label: str
    directory: Path
    state: State = State.queued
    because: str = ""
    """Why the job is in this state, for people."""
    reason: Reason | None = None
    """Why the job ended; None if it has not ended, or the reason is unknown."""
    code: int = 0
    rank: int = 0
    """The rank that ended the job: its output and its exception say why."""
    restarts: int = 0
    hang: str = ""
    """A hang of this attempt that was only logged, for people."""
    waits_for: str = ""
    """On a cluster: Slurm's reason why the job waits in the queue."""
    taken: float = 0.0
    """When the wrapper's last state was read, by the monotonic clock."""
    _stamp: tuple[int, int] | None = None
    _seen: SweepJob | None = None
    """The job as `view` has read it last."""

    @abstractmethod
    def is_own(self, content: JobState) -> bool:
        """Whether a state was written by the observed start of the job."""

    def read_state(self) -> JobState | None:
        """The state that the job's wrapper has written; None if there is none."""
        return job_state.read(self.directory)

    def forget(self, ended: JobState) -> None:
        """Ignore this state, which an earlier start has left."""
        stat = (forge_dir(self.directory) / STATE).stat()
        if self.read_state() == ended:  # else this start has replaced it
            self._stamp = (stat.st_mtime_ns, stat.st_ino)

    def poll(self) -> None:
        """Read the wrapper's state file, if it changed."""
        try:
            stat = (forge_dir(self.directory) / STATE).stat()
        except FileNotFoundError:
            return
        stamp = (stat.st_mtime_ns, stat.st_ino)
        content = self.read_state() if stamp != self._stamp else None
        if content is None or not self.is_own(content):
            return
        self._stamp = stamp
        self.taken = time.monotonic()
        self.take(content)

    def take(self, content: JobState) -> None:
        """Update this object from the wrapper's state."""
        self.state = content.state
        self.because, self.waits_for = content.because, ""
        self.restarts = content.counts.restarts
        self.hang = content.hang
        self.rank = content.rank

    def view(self, locks: Callable[[], HeldLocks], *, is_due: bool) -> SweepJob:
        """The job as the display shows it.

        Args:
            locks: The locks that processes of this machine hold.
            is_due: Whether to read the files of a running job again, although its state is the
                same.
        """
        seen, hang = self._seen, "" if self.state.is_final else self.hang
        facts: dict[str, Any] = {"because": self.because, "rank": self.rank, "hang": hang}
        facts |= {"waits_for": self.waits_for, "attempts": self.restarts + 1}
        if self.state is State.queued and not self.restarts:
            return SweepJob(self.number, self.directory, (), self.state, self.label, **facts)
        is_same = seen is not None and facts.items() <= vars(seen).items()
        is_same = is_same and seen is not None and self._shown(seen) is seen.state
        if seen is None or not is_same or (is_due and self.state.is_active):
            place = JobPlace(self.number, "", ())
            seen = reader.read_job(place, self.directory, self.label, locks())
            self._seen = seen = replace(seen, state=self._shown(seen), **facts)
        return seen

    def _shown(self, read: SweepJob) -> State:
        """The state that the launcher knows, or `starting` if no step has begun."""
        is_starting = self.state is State.running and read.state is State.starting
        return State.starting if is_starting else self.state


class Views:
    """The jobs as the display shows them; reading their files takes at most a tenth of the time."""

    def __init__(self, jobs: Sequence[ObservedJob]) -> None:
        self._jobs = jobs
        self._due_s = 0.0

    def now(self) -> list[SweepJob]:
        """All jobs; the files of running ones are read once a second, or less often."""
        began = time.monotonic()
        is_due = began >= self._due_s
        locks = functools.cache(HeldLocks)  # read only if a job is
        found = [job.view(locks, is_due=is_due) for job in self._jobs]
        if is_due:
            took_s = time.monotonic() - began
            self._due_s = began + max(_READ_S, 10 * took_s)
        return found


def how_to_resume(jobs: Iterable[ObservedJob], command: str, in_queue: int = 0) -> str:
    """The command, and its effect on the jobs that are not finished; empty if all are finished.

    Args:
        jobs: The jobs that have ended, or were never started.
        command: The command that starts the sweep.
        in_queue: Number of jobs in the cluster's queue, for which the command would wait.
    """
    ended: Counter[str] = Counter()
    waiting = 0
    for job in jobs:
        if job.state.is_final and job.state is not State.finished:
            ended[_WORDS.get(job.reason, job.state.value)] += 1
        waiting += not job.state.is_final
    does = []
    if ended:
        does.append("starts again: " + ", ".join(f"{n} {word}" for word, n in ended.items()))
    if waiting:
        does.append(f"starts {waiting} that have not run yet")
    if in_queue:
        then = "resumes the jobs that failed or were cancelled"
        does.append(f"waits until the sweep's jobs in the queue ({in_queue} now) end, then {then}")
    return f"To resume ({'; '.join(does)}):\n  {command}" if does else ""
