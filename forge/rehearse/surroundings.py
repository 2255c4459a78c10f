"""Which files a script has written outside of the directories that its rehearsal gave it."""

from __future__ import annotations

import os
from pathlib import Path

_NOT_LOOKED_AT = {".git", "__pycache__", ".venv", "node_modules"}
_MOST = 100_000
"""Files that are looked at."""


class Surroundings:
    """The files of the working directory, as they are when it is made.

    Args:
        folder: The working directory.
        own: The directory of the rehearsal.
    """

    def __init__(self, folder: Path, own: Path) -> None:
        self._folder = folder
        self._own = own
        self._before = self._files()

    def written(self) -> list[str]:
        """Files that are new or have changed, relative to the working directory."""
        now = self._files()
        return sorted(name for name, facts in now.items() if self._before.get(name) != facts)

    def _files(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
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
                found[str(path.relative_to(self._folder))] = facts.st_mtime_ns, facts.st_size
            if len(found) > _MOST:
                break
        return found
