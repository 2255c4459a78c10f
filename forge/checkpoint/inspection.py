"""`forge.load`: find, verify and read a checkpoint without claiming or writing anything."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge import messages
from forge.checkpoint import reading, workspace
from forge.checkpoint.format import manifest
from forge.checkpoint.format.manifest import FINAL
from forge.checkpoint.reading import Checkpoint
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.group import collectives
from forge.jobdir import config_file
from forge.jobdir.job_files import forge_dir, step_dirs, step_of

_TRIES = 5
"""Attempts to find a checkpoint: a running job can remove old ones in the meantime."""


def load(path: str | os.PathLike[str], *, verify: str = "full") -> Checkpoint:
    """Read a checkpoint to inspect it: `forge.load("outputs/…").state`.

    The call writes nothing and does not lock the directory, so it works while the job is running
    and on a read-only file system. It executes and imports nothing from the checkpoint, so
    untrusted files are safe.

    Args:
        path: A checkpoint (`step_<N>`), or the directory of the checkpoints or of the job: then the
            newest checkpoint in it that verifies is read. For a finished job, that is the state at
            the end of its `with` block.
        verify: `full` (checksums), `size` or `none`.
    Returns:
        A Checkpoint with `path`, `manifest` and `state`: `state["live"]["states"]` maps
        the names of the objects passed to `forge.Run` to their state dicts.
    Raises:
        CheckpointError: If there is no checkpoint.
        DamagedCheckpoint: If the checkpoint, or each checkpoint of the directory, is damaged. The
            message names the file, what was expected and what was found.
        ValueError: For another value of `verify`.
    """
    if verify not in Verify.__members__:
        raise ValueError(f"verify={verify!r}: expected {', '.join(Verify.__members__)}")
    read = functools.partial(_read, verify=Verify[verify])
    path = Path(path)
    where = Path(os.path.realpath(path))  # `latest` is a link
    try:
        if not where.exists():
            gone = f" It is a link to {os.readlink(path)}." if path.is_symlink() else ""
            raise CheckpointError(f"{path} does not exist.{gone} {_EXPECTED}")
        if not where.is_dir():
            raise CheckpointError(f"{path} is a file. {_EXPECTED}")
        if step_of(where) is not None or os.path.lexists(where / manifest.NAME):
            return read(where)
        return _newest(_checkpoint_dir(where), read)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


_EXPECTED = (
    "Expected a checkpoint (`step_<N>`), a directory of them, or the directory of a job that has"
    " saved one."
)


def state_of(name: str, directory: Path, verify: Verify) -> Any:
    """The state of one object of a Run, from the checkpoint that the Run would resume from.

    With several ranks it is that of this rank, if torch.distributed is initialised.

    Args:
        name: The name of the object.
        directory: The checkpoint directory of the Run.
        verify: What to verify.
    Returns:
        The state; None if there is no checkpoint.
    Raises:
        CheckpointError: If no checkpoint is usable, or it has no object of this name.
    """
    rank, size = collectives.rank_and_size()
    read = functools.partial(_read, verify=verify, rank=rank, size=size)
    try:
        if not directory.is_dir():
            return None
        hidden = workspace.interrupted(directory)  # first: an attempt could restore them meanwhile
        visible = step_dirs(directory) or step_dirs(directory)  # twice: see `_has_steps`
        candidates = {path.name: path for path in visible} | hidden
        if not candidates:
            return None
        newest_first = sorted(candidates, key=lambda name: step_of(Path(name)) or 0, reverse=True)
        found, passed_over = reading.first_good(map(candidates.__getitem__, newest_first), read)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    if found is None:
        raise _unusable(directory, passed_over)
    states = found.state["live"]["states"]
    if name not in states:
        raise CheckpointError(
            f"{found.path}: has no state of `{name}`. It has {', '.join(states)}: the names under"
            " which the objects were given to forge.Run."
        )
    return states[name]


def _unusable(directory: Path, passed_over: dict[Path, DamagedCheckpoint]) -> DamagedCheckpoint:
    lines = "".join(f"\n  - {error}" for error in passed_over.values())
    return DamagedCheckpoint(f"No checkpoint in {directory} can be used:{lines}")


def _read(path: Path, verify: Verify, rank: int = 0, size: int | None = None) -> Checkpoint:
    try:
        return reading.read(path, verify=verify, rank=rank, size=size)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error


def _newest(directory: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint:
    for _ in range(_TRIES):
        candidates = step_dirs(directory)
        found, passed_over = reading.first_good(candidates, read)
        if found is not None:
            final = found.path.with_name(FINAL + found.path.name)
            if found.manifest.is_complete and os.path.lexists(final):
                found, damaged = reading.first_good([final, found.path], read)
                passed_over |= damaged
        if found is not None:
            for error in passed_over.values():
                messages.warn(f"Skipped {error}")
            return found
        if step_dirs(directory) == candidates:
            break
    raise _unusable(directory, passed_over)


def _checkpoint_dir(where: Path) -> Path:
    """The checkpoint directory: `where` itself, or that of the job in `where`."""
    configured = config_file.checkpoint_dir(where)
    below = _directories(where)
    own = [configured] if configured else []
    for candidates in ([where], own, _directories(configured) if configured else [], below):
        found = [path for path in candidates if _has_steps(path)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(os.path.relpath(path, where) for path in found)
            raise CheckpointError(
                f"{where} has several directories of checkpoints. Name one of them: {names}"
            )
    if forge_dir(where).is_dir():
        raise CheckpointError(f"The job in {where} has not saved a checkpoint yet")
    jobs = [path for path in below if forge_dir(path).is_dir()]
    if len(jobs) == 1:
        return _checkpoint_dir(jobs[0])
    if jobs:
        shown = messages.truncate_list([path.name for path in jobs], 8)
        raise CheckpointError(f"{where} has several jobs. Name one of them: {shown}")
    raise CheckpointError(f"{where} has no checkpoint. {_EXPECTED}")


def _directories(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir()) if path.is_dir() else []


def _has_steps(path: Path) -> bool:
    """List twice: one listing can miss the new checkpoint and the one removed meanwhile."""
    return path.is_dir() and bool(step_dirs(path) or step_dirs(path))
