"""A job of several ranks, `jobs/ranks.py`: each a process of its own, forked."""

from __future__ import annotations

import functools
import json
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
import warm
from harness import JOBS, PATIENCE_S, Process, assert_same_bits

from forge.jobdir import ledger

SHARDED = ("shards.py", "norms.py", "alike.py")


class RankedJob:
    """One attempt after the other, each of `size` ranks."""

    def __init__(self, directory: Path, size: int = 2, script: str = "ranks.py", **spec):
        self.directory, self.size, self.spec = directory, size, spec
        self.script = JOBS / script
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that its ranks need, apart from torch."""
        is_sharded = self.spec.get("wrap") == "fsdp2" or self.script.name in SHARDED
        return warm.SHARDING if is_sharded else ()

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def start(self, environs: Sequence[dict[str, str]] = ()) -> list[Process]:
        """One attempt; `environs` are for each rank its own."""
        common = {
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "RES_OPTIONS": "timeout:1 attempts:1",  # a store looks its own address up
            "MEETING": str(self.directory / f"meeting_{uuid.uuid4().hex}"),
        }
        command = [sys.executable, str(self.script), str(self.directory), json.dumps(self.spec)]
        return [
            Process(
                command,
                self.directory / f"output_{rank}.txt",
                cwd=self.directory,
                popen=functools.partial(warm.Popen, imports=self.imports),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                **common,
                **(environs[rank] if environs else {}),
            )
            for rank in range(self.size)
        ]

    def run(self, **env: str) -> list[int]:
        """The exit codes of one attempt, by rank."""
        processes = self.start([env] * self.size)
        try:
            return [one.wait(PATIENCE_S) for one in processes]
        except BaseException as error:
            for one in processes:
                one.popen.kill()
            error.add_note(self.output)
            raise

    def run_to_end(self, *expected: list[int], **env: str) -> None:
        """Attempts with these exit codes, then one in which every rank finishes."""
        for codes in (*expected, [0] * self.size):
            found = self.run(**env)
            assert found == codes, f"expected {codes}, found {found}:\n{self.output}"

    @property
    def output(self) -> str:
        paths = [self.directory / f"output_{rank}.txt" for rank in range(self.size)]
        return "\n".join(f"-- {p.name}\n{p.read_text(errors='replace')}" for p in paths)

    @property
    def printed(self) -> list[list[str]]:
        """The lines of each rank, without those of torch's stores, on name servers above all."""
        paths = [self.directory / f"output_{rank}.txt" for rank in range(self.size)]
        lines = [path.read_text().splitlines() for path in paths]
        return [[line for line in one if "] [c10d] " not in line] for one in lines]

    @property
    def weights(self) -> list[dict[str, torch.Tensor]]:
        paths = [self.directory / f"weights_{rank}.pt" for rank in range(self.size)]
        return [torch.load(path, weights_only=True) for path in paths]

    @property
    def history(self) -> ledger.History:
        """Of rank 0."""
        assert "FORGE_RANK" not in os.environ
        return ledger.read(self.checkpoints)

    def assert_same_run(self, other: RankedJob) -> None:
        """The same bits on every rank, and the same metrics."""
        for one, expected in zip(self.weights, other.weights, strict=True):
            assert_same_bits(one, expected)
        assert self.history.metrics == other.history.metrics
