"""`forge rehearse` as a process, in a directory of the test's own."""

import sys
from functools import partial
from pathlib import Path

import pytest
import warm
from harness import FORGE, Process

PATIENCE_S = 280
"""Seconds for a few starts of a small script, on a busy machine."""


class Rehearsed:
    """A folder with a script, and rehearsals of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs = folder / "runs"
        self.output = ""

    def start(self, script: str, *arguments: str, options: tuple[str, ...] = ()) -> Process:
        (self.folder / "train.py").write_text(script)
        return self.start_command([sys.executable, "train.py", *arguments], options)

    def start_command(self, command: list[str], options: tuple[str, ...] = ()) -> Process:
        rehearse = [sys.executable, FORGE, "rehearse", "--directory", str(self.runs)]
        return Process(
            [*rehearse, *options, "--", *command],
            self.folder / "output.txt",
            self.folder,
            partial(warm.Popen, is_parent=True),
            OMP_NUM_THREADS="1",
        )

    def run(self, script: str, *arguments: str, options: tuple[str, ...] = ("--times", "1")) -> int:
        return self.ended(self.start(script, *arguments, options=options))

    def run_command(self, command: list[str], timeout_s: float = PATIENCE_S) -> int:
        options = ("--times", "1", "--seed", "7")
        return self.ended(self.start_command(command, options), timeout_s)

    def ended(self, process: Process, timeout_s: float = PATIENCE_S) -> int:
        code = process.wait(timeout_s)
        self.output = process.output
        return code


@pytest.fixture
def rehearsed(tmp_path):
    """An empty folder for a script."""
    return Rehearsed(tmp_path)
