"""Which jobs of a sweep were submitted, and under which numbers Slurm knows them.

<sweep dir>/.forge/slurm/jobs.jsonl   one line a call of sbatch: {number of the job: Slurm's}
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from forge.job_files import forge_dir


class Submitted:
    """The last submission of each job of a sweep."""

    def __init__(self, sweep: Path) -> None:
        self._path = forge_dir(sweep) / "slurm" / "jobs.jsonl"
        self.ids: dict[int, str] = {}
        """Hydra's number of a job -> Slurm's: `12`, or `12_3` in an array."""
        text = self._path.read_text(errors="replace") if self._path.exists() else ""
        for line in text.split("\n"):
            try:
                entry = {int(number): str(name) for number, name in json.loads(line).items()}
            except (ValueError, AttributeError):
                continue  # torn by a crash
            self.ids |= entry

    def add(self, ids: dict[int, str]) -> None:
        """Remember a submission; it survives whatever happens to this process."""
        self.ids |= ids
        with self._path.open("a") as file:
            # Begins with a newline: the last line may have been torn.
            file.write("\n" + json.dumps(ids) + "\n")
            file.flush()
            os.fsync(file.fileno())
