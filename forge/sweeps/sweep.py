"""A sweep as its directory describes it: the jobs, and whether a launcher looks after them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge.errors import NoSweep
from forge.filesystem.files import FORGE, open_file, read_plain
from forge.jobdir.job_files import LAUNCH, LOCK, forge_dir
from forge.jobdir.job_state import State
from forge.slurm.submitted import Submitted
from forge.sweeps import collect, find, reader, words
from forge.sweeps.find import is_job
from forge.sweeps.job import SweepJob
from forge.sweeps.liveness import HeldLocks
from forge.sweeps.reader import INDEX, JobPlace


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep; a single run is a sweep of one job."""

    path: Path
    """The sweep's directory, or that of the run."""
    jobs: tuple[SweepJob, ...]
    common: tuple[str, ...] = ()
    """The overrides that all jobs have in common."""
    is_single: bool = False
    """Whether it is a single run."""
    launcher: int | None = None
    """The pid of the launcher that runs on this machine; None: there is none, or it is unknown."""
    snapshot: str = ""
    """The copy of the code from which the jobs run; empty: they run from the code itself."""
    missing: tuple[str, ...] = ()
    """Files that could not be read, and why, for people."""

    def counts(self) -> Counter[State]:
        """State -> number of jobs."""
        return Counter(job.state for job in self.jobs)

    def frame(self) -> Any:
        """A pandas DataFrame with a row for each job: overrides, result, last and best metrics.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        import pandas as pd

        rows = collect.rows(self.jobs)
        return pd.DataFrame(rows, columns=collect.columns(rows))

    def command(self, name: str, *words: object) -> str:
        """A command about this sweep, to be typed in the current directory.

        Args:
            name: The name of the command of forge, and its options.
            words: Its arguments after the sweep.
        """
        if self.is_single and name == "resume":
            return f"sh {shlex.quote(str(forge_dir(self.path) / 'resume.sh'))}"
        return " ".join(filter(None, ("forge", name, self._argument, *map(str, words))))

    @functools.cached_property
    def _argument(self) -> str:
        """The sweep's path in a command; empty if the command finds the sweep without it."""
        with contextlib.suppress(NoSweep, OSError):
            found = find.find(None)
            if not found.job and os.path.realpath(found.path) == os.path.realpath(self.path):
                return ""
        return shlex.quote(str(self.path))

    def find(self, wanted: str) -> SweepJob:
        """A job by its number, its Slurm id, its directory, or an override such as `lr=0.1`.

        A number that is also the Slurm id of another job is the number; overrides that are all of a
        job's label are that job.

        Raises:
            NoSweep: If no job, or more than one, matches.
        """
        found = [job for job in self.jobs if wanted == str(job.number)]
        found = found or [job for job in self.jobs if wanted and wanted == job.label]
        found = found or [job for job in self.jobs if _is_called(job, wanted)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(_name(job) for job in (found or self.jobs)[:5])
        more = f", … ({len(found or self.jobs)} jobs)" if len(found or self.jobs) > 5 else ""
        what = "more than one job matches" if found else "there is no such job"
        raise NoSweep(
            f"`{wanted}`: {what} in {self.path}. Expected a number, a Slurm job id, a directory or"
            f" overrides, one of: {known}{more}"
        )


def _name(job: SweepJob) -> str:
    return f"{job.number} ({job.label})" if job.label else str(job.number)


def _is_called(job: SweepJob, wanted: str) -> bool:
    if wanted and wanted == job.slurm_id:
        return True
    left = f",{wanted.replace(' ', ',')},"
    for override in sorted(job.overrides, key=len, reverse=True):  # its value can have commas
        left = left.replace(f",{override.replace(' ', ',')},", ",", 1)
    if "=" in wanted and not left.strip(","):
        return True
    return os.path.realpath(wanted) == os.path.realpath(job.directory)


def sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep, or a single run, from its directory: `forge.sweep("multirun/…").jobs`.

    The call writes and locks nothing, so it works while jobs run, and on a read-only file system.

    Args:
        path: The directory of a sweep (Hydra's `hydra.sweep.dir`), of one of its jobs, or of a run
            without a launcher.
    Returns:
        The jobs as they are now. `job.history()` and `job.curve(metric)` read more of a job.
    Raises:
        NoSweep: If the path is none of these.
    """
    path = Path(path).absolute()
    if (forge_dir(path) / INDEX).is_file():
        return _sweep(path)
    if is_job(path):
        return _single(path)
    raise NoSweep(
        f"{path}: expected the directory of a sweep or of a run, found no `{FORGE}` in it"
        + ("." if path.is_dir() else ": there is no such directory.")
    )


def read_again(path: Path, job: SweepJob) -> SweepJob:
    """A job of the sweep in `path`, as it is now."""
    place = JobPlace(job.number, "", job.overrides)
    return reader.read_job(place, job.directory, job.label, HeldLocks())


def _sweep(path: Path) -> Sweep:
    locks = HeldLocks()
    index = read_plain(forge_dir(path) / INDEX)
    found, bad = reader.places(index.decode(errors="replace"))
    texts, common = reader.labels(one.overrides for one in found)
    ids = Submitted(path, is_looked_at=True).ids
    jobs = []
    for place, label in zip(found, texts, strict=True):
        directory = Path(os.path.normpath(path / place.subdir))
        job = reader.read_job(place, directory, label, locks)
        slurm_id = job.slurm_id or ids.get(job.number, "")
        # On a cluster the plan of a job that has not started yet is not in its directory.
        jobs.append(replace(job, slurm_id=slurm_id, has_wrapper=True))
    launcher = _launcher(path, locks)
    if launcher is None:  # or it has started since the locks were read
        locks = HeldLocks()
        launcher = _launcher(path, locks)
    if launcher is None and locks.is_held(path) is False:
        jobs = [_without_launcher(job) for job in jobs]
    missing = [f"{words.count(bad, 'damaged line')} in {forge_dir(path) / INDEX}"] if bad else []
    launched = reader.read_json(forge_dir(path) / LAUNCH, missing)
    return Sweep(
        path,
        tuple(jobs),
        tuple(common),
        launcher=launcher,
        snapshot=str(launched.get("snapshot") or ""),
        missing=tuple(missing),
    )


def _without_launcher(job: SweepJob) -> SweepJob:
    """A job of a local sweep without a launcher: nothing starts it."""
    is_waiting = job.state is State.queued and not job.slurm_id
    return replace(job, because="not started yet") if is_waiting and not job.because else job


def _single(path: Path) -> Sweep:
    place = JobPlace(0, ".", ())
    return Sweep(path, (reader.read_job(place, path, "", HeldLocks()),), is_single=True)


def _launcher(path: Path, locks: HeldLocks) -> int | None:
    try:
        with os.fdopen(open_file(forge_dir(path) / LOCK), "rb") as file:
            text = file.read(32).decode(errors="replace")
    except OSError:
        return None
    pid = int(text) if re.fullmatch(r"\d+", text) else None
    return pid if pid is not None and locks.is_held(path, pid) else None
