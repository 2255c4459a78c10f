"""The starts of a sweep's jobs, seconds apart: each job takes the next turn from a file.

<sweep dir>/.forge/slurm/next_start   the Unix time of the next turn

Slurm starts the jobs of an array together. Standard library only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from forge.filesystem.files import open_file
from forge.filesystem.locks import release_lock, take_lock

FILE = "next_start"
_LOOK_S = 0.02
_MOST_S = 3600.0
"""The longest wait: it counts towards the time limit, and another node's clock can be wrong."""


def delay_s(path: Path, stagger_s: float, now: float | None = None) -> float:
    """Take the next turn; returns the seconds until then.

    Args:
        path: The file, which is created if it is missing.
        stagger_s: Seconds between two turns.
        now: Unix time; None: now.
    """
    fd = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        while not take_lock(fd):  # for milliseconds, since nobody keeps the lock
            time.sleep(_LOOK_S)
        now = time.time() if now is None else now
        try:
            turn = float(os.pread(fd, 64, 0))
        except ValueError:  # empty, or torn by a crash
            turn = now
        turn = min(max(now, turn), now + _MOST_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{turn + stagger_s}".encode(), 0)
        return turn - now
    finally:
        release_lock(fd)
