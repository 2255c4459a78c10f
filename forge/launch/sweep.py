"""A sweep's directory: which job lies where, and who may run them.

<sweep dir>/.forge/jobs.jsonl   one line a job: its number, directory and overrides
<sweep dir>/.forge/lock         held by the launcher that runs the sweep
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.errors import DirectoryInUse
from forge.filesystem.files import append, make_trusted_directory, open_file, read_if_there
from forge.filesystem.locks import take_lock
from forge.jobdir.job_files import LOCK, forge_dir


@dataclass(frozen=True)
class Place:
    """Where a job lies."""

    number: int
    subdir: str
    overrides: tuple[str, ...]
    """Sorted: their order makes no difference."""


def _of_the_user(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those of them that make it another job."""
    policy = ("resilience.", "resilience=")
    return tuple(sorted(o for o in overrides if not o.lstrip("+~").startswith(policy)))


class SweepDir:
    """The directory of a sweep, while its launcher runs.

    Raises:
        DirectoryInUse: Where another launcher runs it.
    """

    def __init__(self, path: Path, taken: set[int], *, is_looked_at: bool = False) -> None:
        """`taken`: numbers of jobs that this process has run already.

        One that is only looked at need not be there, and is not claimed.
        """
        self.path = path
        self.index = forge_dir(path) / "jobs.jsonl"
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
        self._remember(self._read())  # now nobody adds to it

    def _remember(self, known: list[Place]) -> None:
        self._known = known
        self._numbers = {place.number for place in known}
        self._by_key = {self.key(place.subdir): place for place in known}
        self._by_overrides: dict[tuple[str, ...], list[Place]] = {}
        for place in known:
            self._by_overrides.setdefault(place.overrides, []).append(place)

    def close(self) -> None:
        """Let others run the sweep."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self) -> list[Place]:
        found = {}
        text = read_if_there(self.index)
        for line in text.split("\n"):
            try:
                entry = json.loads(line)
                place = Place(entry["number"], entry["subdir"], tuple(entry["overrides"]))
            except (ValueError, KeyError, TypeError):
                continue  # torn by a crash: that job had not begun
            found[place.number] = place
        return list(found.values())

    def find(self, overrides: list[str]) -> Place | None:
        """The place of a job with these overrides that nobody has asked for yet."""
        for place in self._by_overrides.get(tuple(sorted(overrides)), []):
            if place.number not in self._taken:
                self._taken.add(place.number)
                return place
        return None

    def find_all(self, jobs: list[list[str]]) -> list[Place | None]:
        """The places of jobs, each once.

        The policy may change from start to start: where no job has these overrides, it is the one
        that has them but for those below `resilience`, if there is one of either.
        """
        found = [self.find(overrides) for overrides in jobs]
        alike: dict[tuple[str, ...], tuple[list[int], list[Place]]] = {}
        for index, place in enumerate(found):
            if place is None:
                alike.setdefault(_of_the_user(jobs[index]), ([], []))[0].append(index)
        for place in self._known:
            own = _of_the_user(place.overrides)
            if own in alike and place.number not in self._taken:
                alike[own][1].append(place)
        for indices, places in alike.values():
            if len(indices) == len(places) == 1:
                found[indices[0]] = places[0]
                self._taken.add(places[0].number)
        return found

    def free_number(self, number: int) -> int:
        """`number`, or where an earlier start of this sweep has used it the next that is free."""
        while number in self._numbers or number in self._taken:
            number += 1
        self._taken.add(number)
        return number

    def of_earlier_batches(self) -> list[Place]:
        """The jobs that this process has run already; to be asked before any other is found."""
        return [place for place in self._known if place.number in self._taken]

    def owner(self, subdir: str) -> Place | None:
        """The known job that lies in this directory, however it is spelled."""
        return self._by_key.get(self.key(subdir))

    def key(self, subdir: str) -> str:
        """The same for every way to spell a subdirectory."""
        return os.path.realpath(self.path / subdir)

    def add(self, places: list[Place]) -> None:
        """Remember new jobs; before they are started, so that they can be found."""
        known = set(self._known)
        new = [place for place in places if place not in known]
        if not new:
            return
        text = ""
        for place in new:
            entry = {"number": place.number, "subdir": place.subdir, "overrides": place.overrides}
            text += json.dumps(entry) + "\n"
        append(self.index, text)
        self._remember(self._known + new)
