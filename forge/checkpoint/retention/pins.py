"""Checkpoints that people pin: an empty file `pinned_step_<N>` beside `step_<N>` keeps it.

Beside it and not inside: nothing is written into a directory that was verified, and the pin also
holds the checkpoint that takes the place of this one. `touch` and `rm` do as well as the command.
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
    """What pins the checkpoint in `path`."""
    return path.with_name(PREFIX + path.name)


def is_pinned(path: Path) -> bool:
    """Whether somebody pinned it.

    Raises:
        OSError: Where that cannot be found out.
    """
    try:
        os.lstat(pin_file(path))
    except FileNotFoundError:
        return False
    return True


def place(path: Path) -> None:
    """Put the pin there, whether or not the checkpoint is there already."""
    with contextlib.suppress(FileExistsError):  # whatever has the name, a link too, is a pin
        os.close(open_file(pin_file(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    durable.sync_directory(path.parent)


def pin(path: Path) -> Path:
    """Pin the checkpoint that `path`, perhaps a link like `latest`, names; return its directory.

    Raises:
        CheckpointError: Where there is none.
    """
    path = _checkpoint(path)
    place(path)
    # Whoever removes looks for the pin after the rename: it is gone now, or safe.
    if not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            pin_file(path).unlink()
        raise CheckpointError(f"{path} was removed just now: the pin came too late")
    return path


def unpin(path: Path) -> Path:
    """Leave the checkpoint that `path` names to the policy again; return its directory.

    Raises:
        CheckpointError: Where there is no pin.
    """
    path = path.resolve()
    try:
        pin_file(path).unlink()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not pinned: there is no {pin_file(path).name}") from None
    durable.sync_directory(path.parent)
    return path


def _checkpoint(path: Path) -> Path:
    found = path.resolve()
    if step_of(found) is None:
        raise CheckpointError(
            f"{path}: expected the directory of a checkpoint (step_<N>), found {found.name}"
        )
    try:
        manifest.read(found)
    except DamagedCheckpoint as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    return found
