"""Pins, and the locks of readers: both keep retention from removing a checkpoint.

A pin is an empty file `pinned_step_<N>` next to `step_<N>`. It is not inside the directory, since a
verified checkpoint is never written to, and the pin also keeps a checkpoint that replaces this one.
`touch` and `rm` work as well as `forge pin`.

Readers take a shared lock on the checkpoint's manifest. The lock is a `flock`: a `fcntl.lockf` lock
ends as soon as the process closes any descriptor of the file, which reading the manifest does.
Without locks in the file system nothing is protected; `fence.py` warns about that when
the directory is claimed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from forge.checkpoint.format import manifest
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem import durable
from forge.filesystem.files import open_file
from forge.filesystem.locks import is_in_place, release_lock, take_lock
from forge.jobdir.job_files import step_of

PIN_PREFIX = "pinned_"

PATIENCE_S = 1.0
"""Seconds that a reader waits for the lock while retention is removing the checkpoint."""


def pin_file(path: Path) -> Path:
    """The file that pins the checkpoint in `path`."""
    return path.with_name(PIN_PREFIX + path.name)


def is_pinned(path: Path) -> bool:
    """Whether the checkpoint in `path` is pinned.

    Raises:
        OSError: If the directory cannot be read.
    """
    try:
        os.lstat(pin_file(path))
    except FileNotFoundError:
        return False
    return True


def add_pin(path: Path) -> None:
    """Create the pin, whether or not the checkpoint exists."""
    with contextlib.suppress(FileExistsError):  # any file of that name is a pin, also a link
        os.close(open_file(pin_file(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    durable.sync_directory(path.parent)


def pin(path: Path) -> Path:
    """Pin the checkpoint in `path`, which can be a link like `latest`; return its directory.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    given, path = path, path.resolve()
    if step_of(path) is None:
        raise CheckpointError(
            f"{given}: expected the directory of a checkpoint (step_<N>), found {path.name}"
        )
    try:
        manifest.read(path)
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{given} is not a checkpoint: {error}") from error
    add_pin(path)
    # Retention checks for the pin after its rename: now the checkpoint is gone, or safe.
    if not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            pin_file(path).unlink()
        raise CheckpointError(
            f"{path} cannot be pinned: the running job removed the checkpoint just now"
        )
    return path


def unpin(path: Path) -> Path:
    """Remove the pin of the checkpoint in `path`; return its directory.

    Raises:
        CheckpointError: If there is no pin.
    """
    path = path.resolve()
    try:
        pin_file(path).unlink()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not pinned: there is no {pin_file(path).name}") from None
    durable.sync_directory(path.parent)
    return path


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
