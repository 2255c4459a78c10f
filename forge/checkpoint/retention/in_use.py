"""Readers take a shared lock on a checkpoint's manifest, so that retention does not remove it.

The lock is a `flock`: a `fcntl.lockf` lock ends as soon as the process closes any descriptor of
the file, which reading the manifest does. Without locks in the file system nothing is protected;
`ownership/locks.py` warns about that when the directory is claimed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from forge.checkpoint.format import manifest
from forge.filesystem.files import open_file
from forge.filesystem.locks import is_in_place, release_lock, take_lock

PATIENCE_S = 1.0
"""Seconds that a reader waits for the lock while retention is removing the checkpoint."""


@contextlib.contextmanager
def reading_lock(path: Path) -> Iterator[None]:
    """Keep the checkpoint in the directory `path` from being removed while it is read.

    If the manifest is missing or cannot be locked, this does nothing: reading reports the error.
    """
    fd = _lock_shared(path)
    try:
        yield
    finally:
        if fd is not None:
            release_lock(fd)


@contextlib.contextmanager
def removing_lock(path: Path) -> Iterator[bool]:
    """Lock out readers of the checkpoint in `path`; yields False while a process reads it."""
    # Open for writing if allowed: an exclusive lock on NFS requires it.
    fd = _open(path, os.O_RDWR, os.O_RDONLY)
    try:
        yield fd is None or take_lock(fd)
    finally:
        if fd is not None:
            release_lock(fd)


def _lock_shared(path: Path) -> int | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        fd = _open(path, os.O_RDONLY)
        if fd is None:
            return None
        if take_lock(fd, is_shared=True) and is_in_place(fd, path / manifest.NAME):
            return fd
        release_lock(fd)  # removed or replaced between opening and locking
        time.sleep(0.005)
    return None


def _open(path: Path, *modes: int) -> int | None:
    """Open the manifest; None if it is not a regular file that can be opened."""
    for mode in modes:
        with contextlib.suppress(OSError):
            return open_file(path / manifest.NAME, mode)
    return None
