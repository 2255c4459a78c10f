"""Whole scripts that train with Lightning, one attempt after another."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import warm
from harness import JOBS, PATIENCE_S, Process

import forge
from forge.checkpoint.format.leaves import differences
from forge.jobdir import ledger
from forge.process import world

NUM_RANKS = {"ranks": 2, "sharded": 2}
FOLDER = warm.PACKAGES["lightning"]


class LightningJob:
    """A script in a directory, with `ForgeCallback` or without it."""

    def __init__(self, directory: Path, script: str, **spec: Any) -> None:
        self.directory, self.spec = directory, {"script": script, **spec}
        self.size = NUM_RANKS.get(script, 1)
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        """Whether the next attempt resumes."""
        return any(self.checkpoints.glob("step_*"))

    def start(self, hits: dict[str, str], on: int | None = 0, **env: str) -> list[Process]:
        """One attempt: its processes.

        Args:
            hits: Place -> signal that the process sends itself there.
            on: The rank that gets them; None: all ranks.
        """
        if self.size > 1:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.free_port())}
            env["RES_OPTIONS"] = "timeout:1 attempts:1"
        found = []
        for rank in range(self.size):
            at = hits if on in (rank, None) else {}
            found.append(
                Process(
                    [
                        sys.executable,
                        str(JOBS / "lightning_scripts.py"),
                        str(self.directory),
                        json.dumps(self.spec),
                    ],
                    self.directory / f"output_{rank}.txt",
                    cwd=self.directory,
                    popen=functools.partial(warm.Popen, imports=warm.LIGHTNING),
                    HITS=json.dumps(at),
                    PYTHONPATH=_environment()["PYTHONPATH"],
                    **env,
                    **({"LOCAL_RANK": str(rank)} if self.size > 1 else {}),
                )
            )
        return found

    def attempt(
        self, hits: dict[str, str] | None = None, on: int | None = 0, **env: str
    ) -> list[int]:
        """The exit codes of one attempt, by rank."""
        processes = self.start(hits or {}, on, **env)
        try:
            return [one.wait(PATIENCE_S) for one in processes]
        except BaseException:
            for one in processes:
                one.popen.kill()
            raise

    def run_to_end(self, *attempts: tuple[dict[str, str], int]) -> None:
        """Attempts with these hits, and the exit code of all ranks; then one that finishes."""
        for hits, code in (*attempts, ({}, 0)):
            found = self.attempt(hits)
            assert found == [code] * self.size, f"expected {code}, found {found}:\n{self.output}"

    @property
    def output(self) -> str:
        paths = sorted(self.directory.glob("output_*.txt"))
        return "\n".join(f"-- {one.name}\n{one.read_text(errors='replace')}" for one in paths)

    @property
    def final(self) -> Any:
        """What each rank could read after `fit`; paths are relative to the directory."""
        paths = sorted(self.directory.glob("final_*.pt"))
        assert len(paths) == self.size, self.output
        left = [torch.load(one, weights_only=False) for one in paths]
        return _relative(left, str(self.directory))

    @property
    def state(self) -> Any:
        """The last checkpoint of forge."""
        return _relative(forge.load(self.checkpoints).state, str(self.directory))

    @property
    def num_repeated(self) -> int:
        """Batches that were trained on more than once."""
        batches = (self.directory / "steps.txt").read_text().split()
        return len(batches) - len(set(batches))

    def differences(self, other: LightningJob) -> list[str]:
        """What differs from another run: the checkpoint, the logged values, what was left."""
        found = [str(one) for one in differences(self.state, other.state)]
        if ledger.read(self.checkpoints).metrics != ledger.read(other.checkpoints).metrics:
            found.append("logged values")
        return found + self.different_ends(other)

    def different_ends(self, other: LightningJob) -> list[str]:
        """What differs in what was left."""
        return [str(one) for one in differences(self.final, other.final)]


def run_script(
    script: Path, directory: Path, *arguments: str, kills: dict[str, str] | None = None
) -> tuple[int, str]:
    """The exit code and the output of a script, in a process that has imported Lightning.

    Args:
        script: Any Python script.
        directory: Where it runs.
        arguments: Its arguments.
        kills: Step of forge -> signal that the process gets in it.
    """
    command, options = [sys.executable, str(script), *arguments], {"cwd": directory, "kills": kills}
    popen = functools.partial(warm.Popen, imports=warm.LIGHTNING, env=_environment(), **options)
    with popen(command, stdout=-1, stderr=-2, text=True, start_new_session=True) as process:
        printed = process.communicate()[0]
    return process.returncode, printed


def run_function(
    script: str, name: str, directory: Path, kills: dict[str, str] | None = None
) -> tuple[int, str]:
    """The exit code and the output of a function of a script in `jobs`."""
    return run_script(JOBS / script, directory, name, kills=kills)


def check_part(name: str) -> None:
    """Run a function of jobs/lightning_parts.py.

    Raises:
        AssertionError: With what the process printed, if the function failed.
    """
    code, printed = run_function("lightning_parts.py", name, JOBS)
    assert code == 0, printed[-2000:]


def _environment() -> dict[str, str]:
    paths = [str(JOBS), os.environ.get("PYTHONPATH", ""), FOLDER]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _relative(value: Any, directory: str) -> Any:
    if isinstance(value, str):
        return value.replace(directory, ".")
    if isinstance(value, dict):
        return {_relative(k, directory): _relative(v, directory) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_relative(one, directory) for one in value]
    return value
