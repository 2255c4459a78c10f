"""The state and the requeue counts of a job without a wrapper, kept over all of its starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge import messages
from forge.filesystem.files import make_directory
from forge.jobdir import job_state
from forge.jobdir.job_files import forge_dir
from forge.jobdir.job_state import Counts, JobState, State


class Record:
    """The state file, as one start of a job reads and writes it.

    Args:
        directory: The job's directory.
        job: The scheduler's name for the job.
        start: The name of this start, the same in all tasks of the job.
    """

    def __init__(self, directory: Path, job: str, start: str) -> None:
        self._directory = directory
        self._job, self._start = job, start
        self.counts = Counts()

    def read(self) -> JobState | None:
        """The state that was written in any start of this job; None if none was."""
        found = job_state.read(self._directory)
        return found if found is not None and found.job == self._job else None

    def of_this_start(self) -> JobState | None:
        """The state that was written in this start; None before that."""
        found = self.read()
        return found if found is not None and found.start == self._start else None

    def write(self, state: State, because: str = "", code: int = 0, **more: Any) -> None:
        """Replace the file; an error, such as a full disk, is logged and does not end the job."""
        content = JobState(
            state=state,
            because=because,
            code=code,
            job=self._job,
            start=self._start,
            counts=self.counts,
            **more,
        )
        try:
            make_directory(forge_dir(self._directory))
            content.write(self._directory)
        except OSError as error:
            messages.warn(f"state.json cannot be written: {error}")
