"""The record of a sweep's submitted jobs, with their Slurm job ids.

<sweep dir>/.forge/slurm/jobs.jsonl   two lines for each call of sbatch: before the call, the batch
                                      script and Hydra's numbers of its jobs; after the call, the
                                      script and Slurm's job id
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.filesystem.files import append, read_if_there
from forge.jobdir.job_files import forge_dir
from forge.slurm.client import Queued


def submissions(sweep: Path) -> Path:
    """The directory in which a sweep records its submissions."""
    return forge_dir(sweep) / "slurm"


class Submitted:
    """The last submission of each job of a sweep."""

    def __init__(self, sweep: Path) -> None:
        self.sweep = sweep
        self._path = submissions(sweep) / "jobs.jsonl"
        self.ids: dict[int, str] = {}
        """Hydra's number of a job -> its Slurm id: `12`, or `12_3` in an array."""
        self.indices: dict[int, int] = {}
        """Its place in the bundle of its submission."""
        self.scripts: dict[int, str] = {}
        """Path of each job's batch script, which is unique; Slurm reuses ids."""
        self.composed: dict[int, str] = {}
        """Fingerprint of the config with which each job was submitted."""
        self._unanswered: dict[str, list[int]] = {}
        text = read_if_there(self._path)
        for line in text.split("\n"):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # incomplete after a crash

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever submitted."""
        return not self.ids and not self._unanswered

    def note_request(self, script: Path, numbers: list[int], composed: list[str]) -> None:
        """Record a submission before sbatch: this process can die before Slurm answers."""
        short = [one[:12] for one in composed]
        self._write({"script": str(script), "numbers": numbers, "composed": short})

    def has_changed(self, number: int, composed: str) -> bool:
        """Whether a job's config has changed since its submission."""
        return self.composed.get(number) not in (None, composed[:12])

    def note_answer(self, script: Path, slurm_id: str) -> None:
        """Record Slurm's answer, so that it survives a crash of this process."""
        self._write({"script": str(script), "id": slurm_id})

    def find_lost(self, queue: Mapping[str, Queued]) -> None:
        """Find the ids of submissions without an answer, by the batch scripts in the queue."""
        for name, queued in queue.items():
            if self.is_lost(Path(queued.script)):
                self.note_answer(Path(queued.script), name.partition("_")[0])

    def is_lost(self, script: Path) -> bool:
        """Whether the script was submitted, but Slurm's answer was not received."""
        return str(script) in self._unanswered

    def _take(self, entry: dict[str, Any]) -> None:
        if "numbers" in entry:
            numbers = [int(number) for number in entry["numbers"]]
            self._unanswered[entry["script"]] = numbers
            self.scripts |= dict.fromkeys(numbers, entry["script"])
            self.indices |= {number: index for index, number in enumerate(numbers)}
            self.composed |= dict(zip(numbers, entry["composed"], strict=True))
            return
        numbers, slurm_id = self._unanswered.pop(entry["script"]), entry["id"]
        for index, number in enumerate(numbers):
            self.ids[number] = slurm_id if len(numbers) == 1 else f"{slurm_id}_{index}"

    def _write(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        append(self._path, json.dumps(entry) + "\n")
