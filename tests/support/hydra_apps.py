"""True Hydra apps as processes, in a folder of the user's."""

import shutil
import subprocess
from pathlib import Path

import forked
import hydra
import torch
import warm

APP = Path(__file__).parent / "app"
VERSION_BASE = {"version_base": None} if hydra.__version__ < "1.4" else {}
"""Hydra 1.3 asks for it, and Hydra 1.4 warns of it."""


class App:
    """A user's folder with a train.py and a train.yaml."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(APP, folder)

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        return self.python("train.py", *arguments)

    def python(self, *command: str) -> subprocess.CompletedProcess:
        return forked.completed([*command], self.folder)

    def shell(self, command, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            cwd=self.folder,
            text=True,
            timeout=120,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )

    def resume(self, output: str, **how: bool) -> subprocess.CompletedProcess:
        """By the command that was printed."""
        return warm.run_printed(output, **how)

    def seen(self, job: str) -> list[str]:
        return (self.folder / job / "seen.txt").read_text().splitlines()

    def weights(self, job: str):
        return torch.load(self.folder / job / "weights.pt", weights_only=True)
