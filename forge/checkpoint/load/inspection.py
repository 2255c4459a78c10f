"""Checkpoints looked at from outside: found, verified, read; nothing is claimed or written."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from forge import messages
from forge.checkpoint.format import manifest
from forge.checkpoint.format.names import FINAL
from forge.checkpoint.load import reading
from forge.checkpoint.load.reading import Checkpoint
from forge.checkpoint.retention.in_use import reading_lock
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem.steps import step_dirs, step_of
from forge.jobdir import job_dir
from forge.jobdir.job_files import forge_dir

_TRIES = 5
"""A running job removes old checkpoints while one is looking."""


def load(path: str | os.PathLike[str], *, verify: str = "full") -> Checkpoint:
    """Read a checkpoint to look at it: `forge.load("outputs/…").state`.

    Nothing is claimed or written, so that it works beside a running job and on a read-only
    directory; nothing is executed or imported, so that it can be anybody's.

    Args:
        path: A step directory; or a checkpoint directory or a job's directory, of which the
            newest checkpoint that verifies is taken, as a resume would. Of a finished job it is
            the state at the exit of its `with` block, also if a start begins with an earlier one.
        verify: `full` (checksums), `size` or `none`.
    Returns:
        With `path`, `manifest` and `state`: `state["live"]["states"]` has the objects given to
        `forge.Run`, by name.
    Raises:
        CheckpointError: Where there is no checkpoint.
        DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
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
            raise CheckpointError(f"{path}: there is nothing here.{gone} {_EXPECTED}")
        if not where.is_dir():
            raise CheckpointError(f"{path}: is a file. {_EXPECTED}")
        if step_of(where) is not None or os.path.lexists(where / manifest.NAME):
            return read(where)
        return _newest(_checkpoint_dir(where), read)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


_EXPECTED = (
    "Expected a checkpoint (`step_<N>`), a directory of them, or the directory of a job that has"
    " saved one."
)


def _read(path: Path, verify: Verify) -> Checkpoint:
    try:
        with reading_lock(path):
            return reading.read(path, verify=verify)
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
                messages.warn(f"Passed over {error}")
            return found
        if step_dirs(directory) == candidates:
            break
    lines = "".join(f"\n  - {error}" for error in passed_over.values())
    raise DamagedCheckpoint(f"No checkpoint in {directory} can be used:{lines}")


def _checkpoint_dir(where: Path) -> Path:
    """The directory of checkpoints that `where` is, or that the job there has."""
    configured = job_dir.checkpoint_dir(where)
    below = _directories(where)
    own = [configured] if configured else []
    for candidates in ([where], own, _directories(configured) if configured else [], below):
        found = [path for path in candidates if _has_steps(path)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(os.path.relpath(path, where) for path in found)
            raise CheckpointError(f"{where}: has several directories of checkpoints: {names}")
    if forge_dir(where).is_dir():
        raise CheckpointError(f"{where}: this job has not saved a checkpoint yet")
    jobs = [path.name for path in below if forge_dir(path).is_dir()]
    if jobs:
        shown = messages.few(jobs, 8)
        raise CheckpointError(f"{where}: has several jobs. Name one of them: {shown}")
    raise CheckpointError(f"{where}: has no checkpoint. {_EXPECTED}")


def _directories(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir()) if path.is_dir() else []


def _has_steps(path: Path) -> bool:
    """Two looks: one can miss both what is renamed to its place and what is removed meanwhile."""
    return path.is_dir() and bool(step_dirs(path) or step_dirs(path))
