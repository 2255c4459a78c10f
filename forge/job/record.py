"""The state and the requeue counts of a job without a wrapper, kept over all of its starts.

They are in `.forge/state.json` in the job's directory, in the format that a wrapper writes.
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
    """The state file, as one start of a job reads and writes it.

    Args:
        directory: The job's directory.
        job: The scheduler's name for the job.
        start: The name of this start, the same in all tasks of the job.
    """

    def __init__(self, directory: Path, job: str, start: str) -> None:
        self._path = forge_dir(directory) / STATE
        self._job, self._start = job, start
        self.content: dict[str, Any] = {}
        """The content that was read last."""
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
        """Replace the file; an error, such as a full disk, is logged and does not end the job."""
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
