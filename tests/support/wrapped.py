"""A wrapper of a job on a cluster whose controller gives the answers it is given: a whole process.

`python wrapped.py FOLDER` runs the job of `FOLDER/says.pickle`, and notes in `FOLDER/notes` what it
asked of Slurm. See `played_jobs.py`, which starts it.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.errors import NoAnswer, SlurmRefused
from forge.slurm import client
from forge.slurm.job_info import JobInfo
from forge.slurm.wrapper import wrapper_of


@dataclass
class Says:
    """What Slurm says to one start of a job."""

    directory: Path
    script: Path
    answers: list[Any]
    """Of `show` and `signal_step`, in order; None: nobody answers. The last one is said again."""
    nodes: dict[str, bool] | None = None
    """Those that the job could run on; None: sinfo is busy."""
    lost: list[str] = field(default_factory=list)
    refuses: Exception | None = None
    """To requeue the job, at the first request."""
    is_step_kept: bool = False
    """Whether the controller is busy as it is asked to end a step for the first time."""
    then: tuple[str, Any] = ("", None)
    """A function of `client`, and the answer of `show` once it was called."""
    is_orphaned: bool = False
    """Whether the batch script is killed, once the wrapper has begun."""
    hours_a_second: float = 0.0
    """How much faster than others the wrapper's clock is."""


class Controller:
    """In the place of `forge.slurm.client`'s commands."""

    def __init__(self, says: Says, folder: Path) -> None:
        self.says, self.folder, self.num_starts = says, folder, 0

    def note(self, *what: Any) -> None:
        with (self.folder / "notes").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def called(self, name: str) -> None:
        if self.says.then[0] == name:
            self.says.answers = [self.says.then[1]]

    def answer(self) -> Any:
        answers = self.says.answers
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if found is None:
            raise NoAnswer("busy")
        if isinstance(found, Exception):
            raise found
        return found

    def show(self, job: str, within_s: float) -> JobInfo:
        self.note("show", within_s)
        return self.answer()

    def signal_step(self, job: str, number: int, name: str, within_s: float) -> bool:
        is_there = self.answer()
        if is_there:
            self.note("signal", name, number)
        return is_there

    def requeue(self, job: str, within_s: float) -> None:
        self.called("requeue")
        refuses, self.says.refuses = self.says.refuses, None
        if refuses:
            raise refuses
        self.note("requeue", job)

    def exclude(self, job: str, nodes: list[str], within_s: float) -> None:
        self.note("exclude", nodes)

    def delay(self, job: str, pause_s: float, within_s: float) -> None:
        self.note("delay", pause_s)

    def end_step(self, job: str, number: int, within_s: float) -> None:
        if self.says.is_step_kept:
            self.says.is_step_kept = False
            raise NoAnswer("busy")
        self.note("end_step", number)

    def nodes_for(self, info: JobInfo, within_s: float) -> dict[str, bool]:
        self.called("nodes_for")
        if self.says.nodes is None:
            raise SlurmRefused("sinfo: busy")
        return self.says.nodes

    def lost_nodes(self, nodes: str, within_s: float) -> list[str]:
        return self.says.lost

    def srun(self, arguments: list[str], output: str, command: list[str]) -> list[str]:
        """A step that does what the next of the prepared scripts does."""
        self.num_starts += 1
        script = self.folder / f"step_{self.num_starts}.sh"
        return ["sh", str(script if script.exists() else self.folder / "finishes.sh")]


def main(folder: Path) -> int:
    says: Says = pickle.loads((folder / "says.pickle").read_bytes())
    controller = Controller(says, folder)
    for name in vars(Controller):
        if not name.startswith("_") and hasattr(client, name):
            setattr(client, name, getattr(controller, name))
    if says.hours_a_second:
        real = time.monotonic
        time.monotonic = lambda: real() * 3600 * says.hours_a_second
    job = wrapper_of(says.directory, says.script)
    if says.is_orphaned:
        os.getppid = lambda: 1
    return job.run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
