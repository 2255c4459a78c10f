"""A training under plain submitit, without forge: it saves every four steps, and when told to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

STEPS, HOLD = 12, 5


class Plain:
    """As submitit's documentation has it."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, folder: str) -> None:
        saved = Path(folder, "saved")
        self.step = int(saved.read_text()) if saved.exists() else 0
        while self.step < STEPS:
            self._note(folder, "steps", self.step)
            if self.step == HOLD and not os.environ.get("SLURM_RESTART_COUNT"):
                self._note(folder, "waits", os.getpid())
                time.sleep(300)
            self.step += 1
            if self.step % 4 == 0:
                saved.write_text(str(self.step))
        self._note(folder, "result", self.step)

    def _note(self, folder: str, what: str, text: Any) -> None:
        with Path(folder, f"{what}.0").open("a") as file:
            file.write(f"{text}\n")

    def checkpoint(self, folder: str) -> DelayedSubmission:
        """Called by submitit's handler, in the middle of a step."""
        Path(folder, "saved").write_text(str(self.step))
        return DelayedSubmission(Plain(), folder)
