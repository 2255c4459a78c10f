"""A job as its launcher sees it, from the small files that the job's wrapper and task write."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from forge.errors import Reason
from forge.jobdir import job_state, ledger
from forge.jobdir.job_files import STATE, forge_dir
from forge.jobdir.job_state import JobState, State
from forge.launch.progress.view import JobView


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
    _since: float = 0.0
    _has_steps: bool = True
    """Whether the job reports its steps; commands of `forge exec` do not."""
    _first: tuple[float, int] | None = None
    """The time at which this attempt was first seen training, and its step then."""

    @abstractmethod
    def is_own(self, content: JobState) -> bool:
        """Whether a state was written by the observed start of the job."""

    def read_state(self) -> JobState | None:
        """The state that the job's wrapper has written; None if there is none."""
        return job_state.read(self.directory)

    def forget(self) -> None:
        """Ignore the current state file, as that of an earlier start."""
        stat = (forge_dir(self.directory) / STATE).stat()
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
        if content.counts.restarts != self.restarts:
            self.restarts, self._first = content.counts.restarts, None
        self._since = content.began
        self.hang = content.hang
        self._has_steps = content.has_steps
        self.rank = content.rank

    def view(self) -> JobView:
        """The job's row in the display."""
        progress = None
        if self.state is not State.queued or self.restarts:
            progress = ledger.read_progress(self.directory)
        step = progress.step if progress else None
        planned = progress.planned if progress else None
        state = self.state
        is_new = progress is None or progress.began < self._since
        if state is State.running and self._has_steps and is_new:
            state = State.starting  # the process runs, but its training loop has not begun
        rate = self._rate(step) if state is State.running and step is not None else None
        left_s = None
        if rate and planned is not None and step is not None and step < planned:
            left_s = (planned - step) / rate
        return JobView(
            self.number,
            self.label,
            self.directory,
            state,
            planned if state is State.finished and planned else step,
            planned,
            self.restarts,
            rate,
            left_s,
            "" if state is State.finished else self.because,
            self.waits_for if state is State.queued else "",
            self.hang,
        )

    def _rate(self, step: int) -> float | None:
        now = time.monotonic()
        if self._first is None or step < self._first[1]:
            self._first = (now, step)
        began, first = self._first
        return (step - first) / (now - began) if now - began > 1 and step > first else None
