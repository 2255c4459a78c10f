"""Which files a script has written outside the directory that its rehearsal gave it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NOT_LOOKED_AT = {".git", "__pycache__", ".venv", "node_modules"}
_MOST = 100_000
"""Files that are compared at most."""
_SHORT = 0.9
"""Part of its size below which a file has lost lines: other digits change a size, too."""


class Surroundings:
    """The files of the working directory at the time of the constructor.

    Args:
        folder: The working directory.
        own: The directory of the rehearsal.
    """

    def __init__(self, folder: Path, own: Path) -> None:
        self._folder = folder
        self._own = own
        self._before = self._uninterrupted = self._files()

    def written(self) -> list[str]:
        """Files that are new or have changed, relative to the working directory."""
        now = self._files()
        return sorted(name for name, facts in now.items() if self._before.get(name) != facts)

    def remember(self) -> None:
        """Keep the sizes that the files have after the uninterrupted runs."""
        self._uninterrupted = self._files()

    def shortened(self) -> list[str]:
        """Files that an interrupted run has left much shorter than an uninterrupted run."""
        now = self._files()
        sizes = {name: size for name, (_, size) in self._uninterrupted.items()}
        return sorted(name for name in sizes if name in now and now[name][1] < _SHORT * sizes[name])

    def _files(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        ours = {(facts.st_dev, facts.st_ino) for facts in map(os.fstat, _open_ones())}
        for folder, names, files in os.walk(self._folder):
            names[:] = [
                one
                for one in sorted(names)
                if one not in _NOT_LOOKED_AT and Path(folder, one) != self._own
            ]
            for name in files:
                path = Path(folder, name)
                try:
                    facts = path.lstat()
                except OSError:  # somebody has removed it
                    continue
                if (facts.st_dev, facts.st_ino) not in ours:
                    name = str(path.relative_to(self._folder))
                    found[name] = facts.st_mtime_ns, facts.st_size
            if len(found) > _MOST:
                break
        return found


def _open_ones() -> list[int]:
    """stdout and stderr: this process can print into a file of the working directory."""
    found = []
    for number in (1, 2):
        with contextlib.suppress(OSError):
            os.fstat(number)
            found.append(number)
    return found
