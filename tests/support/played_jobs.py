"""Jobs on a simulated cluster, of which only the wrapper is real, to test its decisions.

A job's wrapper runs as a process (`wrapped.py`). The step that it starts is a script that writes
the files of the ranks, and the controller's answers are those that a test defines.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forked
import pytest
from plans import LISTENS, planned
from wrapped import Says

from forge.jobdir import node_fault, verdict
from forge.jobdir.job_files import (
    RANK,
    REPORT,
    RESULT,
    STATE,
    forge_dir,
    job_ledger,
    read_json,
    suffix,
    write_json,
)
from forge.slurm.job_info import JobInfo

RUNS = JobInfo("RUNNING", "None", 0, None, left_s=3000.0)
PREEMPTED = JobInfo("RUNNING", "None", 0, "2026-01-01T00:00:07", left_s=3000.0)
SCRIPT = Path(__file__).with_name("wrapped.py")


def report(code: int, rank: int = 0, **changes: Any) -> tuple[int, dict[str, Any]]:
    """The report of a rank's supervisor on the rank's end."""
    return rank, {"code": code, "time": 1.0, "is_held": False, "node": "n1"} | changes


@dataclass
class Ended:
    """The result of one start of a job."""

    code: int
    said: str
    notes: list[list[Any]]
    state: dict[str, Any]
    events: list[dict[str, Any]]
    """The events in the job's ledger, from all its starts."""

    def noted(self, *kinds: str) -> list[Any]:
        """The wrapper's calls to Slurm, of these kinds."""
        return [tuple(one) for one in self.notes if one[0] in kinds]

    @property
    def did(self) -> list[Any]:
        return self.noted("requeue", "exclude", "signal")

    @property
    def reason(self) -> str:
        """The reason in the end event of the last attempt."""
        return [one["reason"] for one in self.events if one["kind"] == "end"][-1]

    @property
    def text(self) -> str:
        return [one["text"] for one in self.events if one["kind"] == "end"][-1]

    @property
    def num_attempts(self) -> int:
        return sum(one["kind"] == "attempt" for one in self.events)


class PlayedJob:
    """A job on a simulated cluster."""

    def __init__(self, directory: Path, script: Path, **changes: Any) -> None:
        self.directory, self.script = directory, script
        self.plan = planned(actions=LISTENS | {"HUP": "save"}, token=str(directory), **changes)
        forge_dir(directory).mkdir(parents=True)
        self.plan.write(directory)
        self._folder = directory.with_name(f"{directory.name}.played")
        self._folder.mkdir()
        self._numbers = itertools.count(1)
        ranks = range(self.plan.slurm.ranks)
        returned = [f"touch '{forge_dir(directory)}/{RESULT}{suffix(rank)}'" for rank in ranks]
        finished = self._left("finished", [report(0, rank) for rank in ranks])
        (self._folder / "finishes.sh").write_text("\n".join([*returned, finished]))

    def _left(self, name: str, reports: Iterable[tuple[int, dict[str, Any]]], **more: Any) -> str:
        """A shell command that copies the files of the ranks into the job's directory."""
        place = self._folder / name
        forge_dir(place).mkdir(parents=True)
        for rank, content in reports:
            (forge_dir(place) / f"{REPORT}{suffix(rank)}").write_text(json.dumps(content))
        if "verdict" in more:
            verdict.write(place, more["verdict"])
        for rank, found in more.get("sick", {}).items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(RANK, str(rank))
                if not rank:
                    patch.delenv(RANK)
                node_fault.write(place, found)
        return f"cp -p '{forge_dir(place)}'/* '{forge_dir(self.directory)}'/ 2>/dev/null"

    def step(
        self, exit_code: int, *reports: tuple[int, dict[str, Any]], first: str = "", **more: Any
    ) -> PlayedJob:
        """Define the end of the next step: the exit code of srun, or a negative signal number.

        Args:
            reports: The reports of the step's ranks.
            first: Shell code that runs before; `$NOTES` has the wrapper's calls so far.
            more: A `verdict`, and the node faults of ranks (`sick`).
        """
        number = next(self._numbers)
        end = f"exit {exit_code}" if exit_code >= 0 else f"kill -{-exit_code} $$"
        left = self._left(f"step {number}", reports, **more)
        lines = [f"NOTES='{self._folder}/notes'", first, left]
        (self._folder / f"step_{number}.sh").write_text("\n".join([*lines, end]))
        return self

    def left(self, state: str, restarts: int, **more: Any) -> PlayedJob:
        """Write the state of a wrapper that was killed in the start with this restart count."""
        content = {"because": "why", "counts": {"preemptions": 2, "restarts": 3}, "pid": 1}
        content |= {"job": "7", "start": str(restarts), "state": state}
        content |= {"step": 4, "time": 5.0, "began": 5.0, "code": 7}
        write_json(forge_dir(self.directory) / STATE, content | more)
        return self

    def run(
        self,
        *answers: Any,
        left_s: float | None = 3000.0,
        job: str = "7",
        restarts: int = 0,
        nodes: Iterable[str] | dict[str, bool] | None = ("n1", "n2", "n3", "n7"),
        on: str = "",
        **says: Any,
    ) -> Ended:
        """Start the job's wrapper, and wait for its end.

        Args:
            answers: The controller's answers, to queries why the job is stopped, for example.
            left_s: The time left in the controller's first answer; None if there is no query.
            on: SLURM_JOB_NODELIST.
        """
        first = [] if left_s is None else [replace(RUNS, left_s=left_s)]
        known = nodes if nodes is None or isinstance(nodes, dict) else dict.fromkeys(nodes, True)
        told = Says(self.directory, self.script, [*first, *answers], nodes=known, **says)
        (self._folder / "says.pickle").write_bytes(pickle.dumps(told))
        for name in ("notes", "said"):
            (self._folder / name).write_text("")
        environment = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts)}
        environment |= {"SLURM_JOB_NODELIST": on} if on else {}
        said, output = self._folder / "said", self.directory / "output.log"
        output.unlink(missing_ok=True)
        code = forked.run([str(SCRIPT), str(self._folder)], self._folder, said, **environment)
        ended = Ended(
            code,
            said.read_text() + (output.read_text() if output.exists() else ""),
            [json.loads(line) for line in (self._folder / "notes").read_text().splitlines()],
            read_json(forge_dir(self.directory) / STATE) or {},
            self.events(),
        )
        for path in self._folder.glob("step_*.sh"):
            path.unlink()
        for path in self._folder.glob("step [0-9]*"):
            shutil.rmtree(path)
        self._numbers = itertools.count(1)
        return ended

    def events(self) -> list[dict[str, Any]]:
        path = job_ledger(self.directory)
        return [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Returns a function that makes jobs of two ranks, each in its own directory."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    numbers = itertools.count()

    def make(**changes: Any) -> PlayedJob:
        directory = tmp_path / str(next(numbers))
        return PlayedJob(directory, tmp_path / ".forge/slurm/script.sh", **{"ranks": 2} | changes)

    return make


KILLED = -signal.SIGKILL
