"""The state and the budgets of a job that has no wrapper: whoever starts it again keeps them.

`.forge/state.json` in the job's directory, as a wrapper writes it.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge import messages
from forge.filesystem.files import make_directory
from forge.job.requeue import Counts
from forge.jobdir.job_files import STATE, forge_dir, read_json, write_json


class Record:
    """That of one start of a job.

    Args:
        directory: The job's.
        job: The name that the scheduler has for the job.
        start: Which start of the job it is: the same for all of its tasks.
    """

    def __init__(self, directory: Path, job: str, start: str) -> None:
        self._path = forge_dir(directory) / STATE
        self._job, self._start = job, start
        self.content: dict[str, Any] = {}
        """What was read last."""
        self.counts = Counts()

    def read(self) -> str:
        """The state that was written in any start of this job; empty if none was."""
        self.content = read_json(self._path) or {}
        is_own = self.content.get("job") == self._job
        return str(self.content.get("state", "")) if is_own else ""

    def of_this_start(self) -> str:
        """The state that was written in this start; empty before that."""
        state = self.read()
        return state if self.content.get("start") == self._start else ""

    def take_over(self) -> None:
        """Continue with the counts that were read last."""
        self.counts = Counts(**self.content["counts"])

    def write(self, state: str, because: str = "", code: int = 0, **more: Any) -> None:
        """Replace what is there; a full disk ends no job, and is logged."""
        content = {
            "job": self._job,
            "start": self._start,
            "state": state,
            "because": because,
            "code": code,
            "pid": os.getpid(),
            "time": time.time(),
            "counts": asdict(self.counts),
            **more,
        }
        try:
            make_directory(self._path.parent)
            write_json(self._path, content)
        except OSError as error:
            messages.warn(f"state.json cannot be written: {error}")
