"""The output of a rehearsal: lines that stay, and on a terminal one line with the current run."""

from __future__ import annotations

import os
import shutil
import sys

_ERASE = "\r\x1b[K"
"""Go to the begin of the line, and remove what is there."""


def say(text: str) -> None:
    """Print lines that stay, immediately."""
    sys.stdout.write(f"{_ERASE if _is_live() else ''}{text}\n")
    sys.stdout.flush()


def show(text: str) -> None:
    """Replace the last line of a terminal; in a file or a pipe nothing is printed."""
    if _is_live():
        sys.stdout.write(f"{_ERASE}{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stdout.flush()


def duration(seconds: float) -> str:
    """`48 s`, `3 min 10 s` or `1 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _is_live() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
