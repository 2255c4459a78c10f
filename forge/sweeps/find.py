"""Finds the sweep that a person means: a path, a Slurm id, the current directory, the newest.

forge status multirun/2026-01-31/12-00-00     a sweep, a job in it, or a file below them
forge status 30410_4                          a Slurm id: of this directory's sweeps, or live
forge status                                  the current directory, or the newest sweep below it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from forge.errors import NoSweep, SlurmError
from forge.filesystem import foreign
from forge.filesystem.files import FORGE
from forge.jobdir.job_files import forge_dir
from forge.slurm import client
from forge.sweeps.reader import INDEX

PARENTS = ("multirun", "outputs")
"""Hydra's default directories of sweeps and of single runs."""
_SLURM_ID = re.compile(r"\d+(_\d+)?")
_DEPTH = 3
"""Levels below `multirun`: a date, a time, and a level more."""
_ASK_S = 10.0


class FoundSweep(NamedTuple):
    """A sweep or a run, and the job in it that was meant."""

    path: Path
    job: str = ""
    """The job's directory or Slurm id; empty if all jobs are meant."""


def find(wanted: str | None, *, is_own: bool = False) -> FoundSweep:
    """The sweep that an argument names.

    Args:
        wanted: A path or a Slurm id; None: the current directory, else the newest sweep below it.
        is_own: Whether the newest one has to be of this user.
    Raises:
        NoSweep: If there is none.
    """
    if wanted is None:
        return above(Path.cwd()) or newest(Path.cwd(), is_own=is_own)
    path = existing(wanted)
    if path is not None:
        found = above(path.absolute())
        if found is not None:
            return found
        if path.is_dir():
            os.listdir(path)  # or say why it cannot be read
            return newest(path.absolute())
    if is_slurm_id(wanted):
        return of_slurm_id(wanted)
    problem = "it is in no sweep and in no run" if path is not None else "there is no such path"
    raise NoSweep(
        f"`{wanted}`: {problem}. Expected the directory of a sweep or of a run, or a Slurm job id"
    )


def existing(word: str) -> Path | None:
    """The path that a word names; None if nothing is there, as with overrides such as `~key=x`."""
    path = os.path.expanduser(word)
    return Path(path) if os.path.exists(path) else None


def above(path: Path) -> FoundSweep | None:
    """The sweep or run that a path belongs to; None if it belongs to none."""
    inside = None
    for one in (path, *path.parents):
        if is_sweep(one):
            return FoundSweep(one, str(inside or ""))
        if inside is None and is_job(one):
            inside = one
    return FoundSweep(inside) if inside is not None else None


def is_job(path: Path) -> bool:
    """Whether a path is the directory of a job, or of a run without a launcher.

    A directory that this user cannot read is none.
    """
    own = forge_dir(path)
    return os.path.isfile(own / "plan.json") or os.path.isdir(own / "ledger")


def is_sweep(path: Path) -> bool:
    """Whether a path is the directory of a sweep; not if this user cannot read it."""
    return os.path.isfile(forge_dir(path) / INDEX)


def newest(path: Path, *, is_own: bool = False) -> FoundSweep:
    """The sweep below a directory that was started last, else the last single run.

    With `is_own`, those of other users are left out.

    Raises:
        NoSweep: If there is none.
    """

    def is_meant(one: Path) -> bool:
        return not is_own or foreign.is_ours(os.stat(one / FORGE).st_uid, one)

    sweeps = [one for one in sweeps_below(path) if is_meant(one)]
    runs = (one for one in _below(path / PARENTS[1], _DEPTH) if is_job(one) and is_meant(one))
    found = sweeps or list(runs)
    if not found:
        raise NoSweep(
            f"{path}: there is no sweep here, nor below {' or '.join(PARENTS)}. Give the directory"
            " of the sweep or of the run (Hydra prints it as `hydra.sweep.dir` or `hydra.run.dir`)"
        )
    return FoundSweep(max(found, key=lambda one: os.stat(one / FORGE).st_mtime))


def sweeps_below(path: Path) -> Iterator[Path]:
    """The sweeps in a directory, in `multirun` below it, or in Hydra's folders of a day."""
    for root, depth in ((path, 1), (path / PARENTS[0], _DEPTH)):
        for one in _below(root, depth):
            if is_sweep(one):
                yield one


def _below(path: Path, depth: int) -> Iterator[Path]:
    """The directories at most `depth` levels below a path, without those in a sweep or a job."""
    try:
        folders = [Path(one.path) for one in os.scandir(path) if one.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for folder in folders:
        if folder.name.startswith("."):
            continue
        yield folder
        if depth > 1 and not os.path.isdir(folder / FORGE):
            yield from _below(folder, depth - 1)


def is_slurm_id(word: str) -> bool:
    """Whether a word looks like the Slurm id of a job."""
    return _SLURM_ID.fullmatch(word) is not None


def of_slurm_id(slurm_id: str) -> FoundSweep:
    """The sweep with a job of this Slurm id: below the current directory, or as Slurm knows it.

    Raises:
        NoSweep: If there is none.
    """
    array = slurm_id.partition("_")[0]
    for path in sweeps_below(Path.cwd()):
        text = _text(path / FORGE / "slurm" / "jobs.jsonl")
        if f'"id": "{array}"' in text:
            return FoundSweep(path, slurm_id if "_" in slurm_id else "")
    try:
        info = client.show(slurm_id, _ASK_S)
    except SlurmError as error:
        raise NoSweep(
            f"`{slurm_id}`: no sweep below {Path.cwd()} has a job with this Slurm id, and Slurm"
            f" does not know it either ({error}). Give the sweep's directory"
        ) from error
    found = above(Path(info.script)) if info.script else None
    if found is None:
        raise NoSweep(f"`{slurm_id}`: this Slurm job was not submitted by forge")
    return found._replace(job=slurm_id if "_" in slurm_id else "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
