"""Pinned checkpoints: an empty file `pinned_step_<N>` next to `step_<N>` keeps retention off it.

The pin is not inside the directory, since a verified checkpoint is never written to, and the pin
also keeps a checkpoint that replaces this one. `touch` and `rm` work as well as `forge pin`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from forge.checkpoint.format import manifest
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem import durable
from forge.filesystem.files import open_file
from forge.filesystem.steps import step_of

PREFIX = "pinned_"


def pin_file(path: Path) -> Path:
    """The file that pins the checkpoint in `path`."""
    return path.with_name(PREFIX + path.name)


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


def add(path: Path) -> None:
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
    add(path)
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
