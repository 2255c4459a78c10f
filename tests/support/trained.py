"""Scripts that train with Accelerate or transformers: whole scripts of users, in a directory each.

A script saves checkpoints of forge in `checkpoints`, and what it ends with in `final_<rank>.pt`.
With PLAIN=1 it trains without forge.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import warm
from harness import JOBS, PATIENCE_S, Process
from repository import ROOT

import forge
from forge.checkpoint.format.leaves import differences
from forge.jobdir import ledger
from forge.process import world

Strikes = dict[str, str]
"""Place -> signal, in one process of one attempt; see jobs/strikes.py."""

PATHS = [warm.FRAMEWORKS, warm.TRL]
MISSING = "the packages of trainers are not installed: make .venv/.frameworks-installed"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_DISABLE_TELEMETRY": "1"}


class Trained:
    """One attempt after the other of a script, each of `ranks` processes.

    Args:
        directory: Where the script runs.
        script: Any Python script.
        ranks: Processes of an attempt.
        checkpoints: Directory of forge's checkpoints, relative to `directory`.
        imports: Modules that are imported once for all attempts.
        env: Environment variables of all attempts.
    """

    def __init__(
        self,
        directory: Path,
        script: Path,
        ranks: int = 1,
        checkpoints: str = "checkpoints",
        imports: tuple[str, ...] = warm.TRAINERS,
        **env: str,
    ) -> None:
        self.directory, self.script, self.ranks, self.env = directory, script, ranks, env
        self.checkpoints, self._imports = directory / checkpoints, imports
        directory.mkdir(parents=True, exist_ok=True)
        assert Path(warm.FRAMEWORKS).is_dir(), MISSING

    def attempt(self, *strikes: Strikes, **env: str) -> list[int]:
        """The exit codes of one attempt, by rank; `strikes` of rank 0 first."""
        paths = os.pathsep.join(
            filter(None, [str(self.script.parent), os.environ.get("PYTHONPATH"), *PATHS])
        )
        common = OFFLINE | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **self.env, **env}
        if self.ranks > 1:
            common |= {
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(world.free_port()),
                "RES_OPTIONS": "timeout:1 attempts:1",
            }
        started = []
        for rank in range(self.ranks):
            at = strikes[rank] if rank < len(strikes) else {}
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.ranks > 1 else {}
            started.append(
                Process(
                    [sys.executable, str(JOBS / "strikes.py"), str(self.script), json.dumps(at)],
                    self.directory / f"output_{rank}.txt",
                    cwd=self.directory,
                    popen=functools.partial(warm.Popen, imports=self._imports),
                    **common,
                    **of_rank,
                )
            )
        try:
            return [one.wait(PATIENCE_S) for one in started]
        except BaseException:
            for one in started:
                one.popen.kill()
            raise

    def run_to_end(self, *attempts: tuple[Sequence[Strikes], int], **env: str) -> None:
        """Attempts with strikes and the exit code of all ranks, then one that finishes."""
        for strikes, code in (*attempts, ((), 0)):
            found = self.attempt(*strikes, **env)
            assert found == [code] * self.ranks, f"expected {code}, found {found}:\n{self.output}"

    @property
    def output(self) -> str:
        """What the ranks printed."""
        paths = sorted(self.directory.glob("output_*.txt"))
        return "\n".join(f"-- {one.name}\n{one.read_text(errors='replace')}" for one in paths)

    @property
    def final(self) -> list[Any]:
        """What the ranks ended with."""
        paths = sorted(self.directory.glob("final_*.pt"))
        assert len(paths) == self.ranks, self.output
        return [without_times(torch.load(one, weights_only=True)) for one in paths]

    @property
    def losses(self) -> list[str]:
        """The loss of each backward pass of rank 0, over all attempts."""
        return (self.directory / "steps_0.txt").read_text().splitlines()

    def num_places(self, kind: str, rank: int) -> int:
        """How often a rank reached a place of this kind, over all attempts; see jobs/strikes.py."""
        lines = (self.directory / f"places_{rank}.txt").read_text().splitlines()
        return lines.count(kind)

    @property
    def repeated(self) -> list[int]:
        """For every attempt but the first: completed steps that it did again."""
        attempts = ledger.read(self.checkpoints).attempts
        starts = [event for one in attempts for event in one.events if event["kind"] == "start"]
        return [one["previous_step"] - one["step"] for one in starts[1:]]

    def differences(self, other: Trained) -> list[str]:
        """What differs from another run: the last checkpoint, the logged values, the end."""
        one, two = (without_times(forge.load(run.checkpoints).state) for run in (self, other))
        found = [str(each) for each in differences(one, two)]
        if ledger.read(self.checkpoints).metrics != ledger.read(other.checkpoints).metrics:
            found.append("logged values")
        return found + self.different_ends(other)

    def different_ends(self, other: Trained) -> list[str]:
        """What differs in what the scripts ended with."""
        return [str(each) for each in differences(self.final, other.final)]


def without_times(state: Any) -> Any:
    """A state without the values whose names say that they are times."""
    if isinstance(state, dict):
        return {
            key: without_times(one)
            for key, one in state.items()
            if not str(key).endswith(("runtime", "per_second"))
        }
    return list(map(without_times, state)) if isinstance(state, list | tuple) else state


def check_part(name: str) -> None:
    """Run a function of jobs/trainer_parts.py in a process that has imported the trainers.

    Raises:
        AssertionError: With what the process printed, if the function failed.
    """
    command = [sys.executable, str(JOBS / "trainer_parts.py"), name]
    paths = [str(ROOT / "tests" / "proofs" / "trainers"), *PATHS]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *paths]))
    assert Path(warm.FRAMEWORKS).is_dir(), MISSING
    popen = functools.partial(
        warm.Popen, imports=warm.TRAINERS, env=os.environ | {"PYTHONPATH": path}
    )
    with popen(command, stdout=-1, stderr=-2, text=True, start_new_session=True) as process:
        printed = process.communicate()[0]
    assert process.returncode == 0, printed[-2000:]
