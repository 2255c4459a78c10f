"""The directories of checkpoints are called `step_<N>`: the one parser of that name."""

from __future__ import annotations

import re
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")


def step_of(path: Path) -> int | None:
    """The number in `step_<N>`, or None for every other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_dirs(directory: Path) -> list[Path]:
    """Everything called `step_<N>`, newest first."""
    found = [path for path in directory.iterdir() if step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)
