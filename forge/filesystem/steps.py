"""Parsing `step_<N>`, the name of a checkpoint's directory."""

from __future__ import annotations

import re
from pathlib import Path

_STEP = re.compile(r"step_(\d+)")


def step_of(path: Path) -> int | None:
    """The number in `step_<N>`, or None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_dirs(directory: Path) -> list[Path]:
    """All paths named `step_<N>` in a directory, newest first."""
    found = [path for path in directory.iterdir() if step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)
