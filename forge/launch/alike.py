"""Notices if jobs of a sweep fail in the same way before any of them has saved a checkpoint.

The cause is then most likely a mistake in the code or in the data, and the jobs that have not
started yet would fail, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from forge.errors import Reason
from forge.jobdir import verdict
from forge.jobdir.job_state import State
from forge.launch import planning
from forge.launch.progress.observed import ObservedJob
from forge.messages import escape

_NOTICE = 3
"""Jobs that fail alike until there is a notice, if no number is configured."""


class Alike:
    """The failures of a sweep's jobs.

    Args:
        sweep_dir: The sweep's directory.
        max_alike: So many jobs that fail alike hold the others back; None: there is only a notice.
    """

    def __init__(self, sweep_dir: Path = Path(), max_alike: int | None = None) -> None:
        self._sweep_dir, self._max_alike = sweep_dir, max_alike
        self._kinds: dict[str, list[int]] = {}
        """An exception and where it was raised -> the numbers of the jobs."""
        self._known: set[int] = set()
        self._is_told = False
        self.is_holding = False
        """Whether the jobs that have not started yet must wait."""

    def check(self, jobs: Sequence[ObservedJob]) -> str:
        """Take the jobs that have failed since the last call into account.

        Args:
            jobs: All jobs of the sweep.
        Returns:
            A message for people; empty if there is nothing new.
        """
        new = [job for job in jobs if job.state is State.failed and job.number not in self._known]
        if self.is_holding or not new:
            return ""
        for job in new:
            self._known.add(job.number)
            if job.reason is Reason.failed and (kind := _kind(job)):
                self._kinds.setdefault(kind, []).append(job.number)
        kind, alike = max(self._kinds.items(), key=lambda one: len(one[1]), default=("", []))
        if len(alike) < (self._max_alike or _NOTICE):
            return ""
        left = sum(job.state is State.queued for job in jobs)
        has_saved = any(planning.has_begun(job.directory) for job in jobs)
        self.is_holding = self._max_alike is not None and not has_saved
        if self._is_told or has_saved or not left:
            return ""
        self._is_told = True
        what = f"{len(alike)} jobs failed alike, and no job has saved a checkpoint yet: {kind}."
        if not self.is_holding:
            return f"{what} hydra.launcher.max_alike={len(alike)} would hold the other jobs back."
        return (
            f"{what} The jobs that have not started yet ({left}) are held back"
            f" (hydra.launcher.max_alike={self._max_alike}). Correct the cause; this starts them:\n"
            f"  forge resume {self._sweep_dir}"
        )


def _kind(job: ObservedJob) -> str:
    """The exception of a job and the line that raised it; empty if main did not raise one."""
    found = verdict.read(job.directory, job.rank)
    if found is None or not found.frame:
        return ""
    return escape(f"{found.text.partition(':')[0]} at {found.frame}")


def held(jobs: Iterable[ObservedJob]) -> None:
    """Say of the jobs that were held back why they have not started."""
    for job in jobs:
        if job.state is State.queued:
            job.because = "held back, since others failed alike"
