"""Checkpoints that somebody reads: held by a shared lock on the manifest, which removing respects.

`flock`, because the locks of `fcntl.lockf` end as soon as their process closes any descriptor of
the same file, and reading the manifest does that. Where the file system keeps no locks everything
does without; `ownership/locks.py` says so when the directory is claimed.
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
"""Seconds a reader waits for whoever is about to remove what it wants to read."""


@contextlib.contextmanager
def reading_lock(path: Path) -> Iterator[None]:
    """Keep the checkpoint in the directory `path` from being removed while it is read.

    Where there is nothing to lock, or no way to, this does nothing: reading tells what is wrong.
    """
    fd = _lock_shared(path)
    try:
        yield
    finally:
        if fd is not None:
            release_lock(fd)


@contextlib.contextmanager
def removing_lock(path: Path) -> Iterator[bool]:
    """Keep readers away from the checkpoint in `path`; yields False while somebody reads it."""
    # For writing, where that may be: an exclusive lock on NFS asks for it.
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
    """The manifest, open; None where there is no plain file that can be opened."""
    for mode in modes:
        with contextlib.suppress(OSError):
            return open_file(path / manifest.NAME, mode)
    return None
