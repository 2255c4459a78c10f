"""A sweep's directory: the directory of each job, and a lock for the launcher.

<sweep dir>/.forge/jobs.jsonl   one line for each job: its number, directory and overrides
<sweep dir>/.forge/lock         locked by the launcher that runs the sweep
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from forge.errors import DirectoryInUse
from forge.filesystem.files import append, make_trusted_directory, open_file, read_if_there
from forge.filesystem.locks import take_lock
from forge.jobdir.job_files import LOCK, forge_dir
from forge.sweeps import reader
from forge.sweeps.reader import JobPlace


def _of_the_user(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides that identify a job: all except those of the policy."""
    policy = ("resilience.", "resilience=")
    return tuple(sorted(o for o in overrides if not o.lstrip("+~").startswith(policy)))


class SweepDir:
    """The directory of a sweep, while its launcher runs.

    Raises:
        DirectoryInUse: If another launcher runs this sweep.
    """

    def __init__(self, path: Path, taken: set[int], *, is_looked_at: bool = False) -> None:
        """`taken`: numbers of jobs that this process has already run.

        With `is_looked_at`, the directory can be missing, and is not locked.
        """
        self.path = path
        self.index = forge_dir(path) / reader.INDEX
        self._remember(self._read())
        self._taken = taken
        self._lock = -1
        if is_looked_at:
            return
        make_trusted_directory(forge_dir(path))
        self._lock = open_file(forge_dir(path) / LOCK, os.O_RDWR | os.O_CREAT)
        if not take_lock(self._lock):
            pid = os.pread(self._lock, 32, 0).decode() or "another process"
            os.close(self._lock)
            raise DirectoryInUse(
                f"{path} belongs to a sweep that is running (pid {pid}). Wait for it, stop it with"
                " Ctrl+C, or choose another `hydra.sweep.dir`."
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        self._remember(self._read())  # no other launcher adds jobs from here on

    def _remember(self, known: list[JobPlace]) -> None:
        self.known = known
        self._numbers = {place.number for place in known}
        self._by_key = {self.key(place.subdir): place for place in known}
        self._by_overrides: dict[tuple[str, ...], list[JobPlace]] = {}
        for place in known:
            self._by_overrides.setdefault(place.overrides, []).append(place)

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self) -> list[JobPlace]:
        return reader.places(read_if_there(self.index))[0]

    def find(self, overrides: list[str]) -> JobPlace | None:
        """The place of a job with these overrides, if no earlier call returned it."""
        for place in self._by_overrides.get(tuple(sorted(overrides)), []):
            if place.number not in self._taken:
                self._taken.add(place.number)
                return place
        return None

    def find_all(self, jobs: list[list[str]]) -> list[JobPlace | None]:
        """The places of jobs; each place is returned once.

        The policy can change between starts: if no job has exactly these overrides, a job that
        differs only in overrides of `resilience` counts, unless that is ambiguous.
        """
        found = [self.find(overrides) for overrides in jobs]
        alike: dict[tuple[str, ...], tuple[list[int], list[JobPlace]]] = {}
        for index, place in enumerate(found):
            if place is None:
                alike.setdefault(_of_the_user(jobs[index]), ([], []))[0].append(index)
        for place in self.known:
            own = _of_the_user(place.overrides)
            if own in alike and place.number not in self._taken:
                alike[own][1].append(place)
        for indices, places in alike.values():
            if len(indices) == len(places) == 1:
                found[indices[0]] = places[0]
                self._taken.add(places[0].number)
        return found

    def free_number(self, number: int) -> int:
        """`number`, or the next free number if an earlier start of this sweep used it."""
        while number in self._numbers or number in self._taken:
            number += 1
        self._taken.add(number)
        return number

    def of_earlier_batches(self) -> list[JobPlace]:
        """The jobs that this process has already run; call it before `find` and `find_all`."""
        return [place for place in self.known if place.number in self._taken]

    def owner(self, subdir: str) -> JobPlace | None:
        """The known job in this directory, however the path is spelled."""
        return self._by_key.get(self.key(subdir))

    def key(self, subdir: str) -> str:
        """A key that is the same for all spellings of a subdirectory."""
        return os.path.realpath(self.path / subdir)

    def add(self, places: list[JobPlace]) -> None:
        """Record new jobs, before they are started, so that a later start finds them."""
        known = set(self.known)
        new = [place for place in places if place not in known]
        if not new:
            return
        text = ""
        for place in new:
            entry = {"number": place.number, "subdir": place.subdir, "overrides": place.overrides}
            text += json.dumps(entry) + "\n"
        append(self.index, text)
        self._remember(self.known + new)
