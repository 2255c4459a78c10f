"""Whole small scripts of a user: run undisturbed, or struck in a step and started again.

A script calls `strike(step)` in each step. The first start gets STRIKE=STEP:SIGNAL, and sends that
signal to itself in that step; the starts after it are undisturbed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from forked import completed

STRIKE = """
import os, signal
_step, _, _name = os.environ.pop("STRIKE", "").partition(":")
def strike(step):
    if _step and step == int(_step):
        os.kill(os.getpid(), getattr(signal, f"SIG{_name}"))
"""


def starts(folder: Path, text: str, strike: str = "") -> list[subprocess.CompletedProcess[str]]:
    """Start a script until it ends with 0; what each start printed, and its exit code.

    Args:
        folder: Where it runs; made if it is missing.
        text: The script, without `strike`.
        strike: The step and the signal of the first start; empty: none.
    """
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(STRIKE + text)
    found = [completed(["script.py"], folder, STRIKE=strike)]
    while found[-1].returncode and len(found) < 4:
        found.append(completed(["script.py"], folder))
    return found


def last_line(start: subprocess.CompletedProcess[str]) -> str:
    """What the script printed last."""
    return start.stdout.rstrip().rpartition("\n")[2]
