"""Directories that this process has claimed: nothing is made in another one that took their place.

Whoever can write above a directory can rename it, and put a link to a private directory of ours in
its place. So its inode is noted at the claim and compared before something is made below its path.
The number of its device is compared as well if it names a disk; those of network and overlay file
systems are given out anew at each mount. The directory stays open: some file systems number an
inode that nobody uses anew, too. One that is away is not another one.
"""

from __future__ import annotations

import os
from pathlib import Path

_claimed: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
"""Path -> (process that opened the directory, its descriptor there), and what it is."""


def note(path: Path) -> None:
    """From now on `path` is the directory that is there now.

    Raises:
        OSError: Where there is none.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | os.O_CLOEXEC)
    forget(path)
    _claimed[str(path)] = (os.getpid(), fd), _identity(os.fstat(fd))


def forget(path: Path) -> None:
    """It may be another one again."""
    opened, _ = _claimed.pop(str(path), (None, None))
    # In a forked child the number may be that of another file by now.
    if opened is not None and opened[0] == os.getpid():
        os.close(opened[1])


def problem(path: Path) -> str:
    """Why nothing may be made at `path`: a claimed directory above it is another one now."""
    text = str(path)
    for claimed, (_, before) in _claimed.items():
        if text != claimed and not text.startswith(claimed + os.sep):
            continue
        try:
            now = _identity(os.stat(claimed))
        except OSError:  # whoever makes something there says so
            continue
        if now != before:
            leads = f", and leads to {os.path.realpath(claimed)}" if os.path.islink(claimed) else ""
            return (
                f"{claimed} is another directory than the one this job has claimed: its inode was"
                f" {before[1]} and is {now[1]}{leads}. Nothing is made there. If you have moved or"
                " restored the directory yourself, start the job again; else somebody who can write"
                " above it has put another one in its place: put the job's own back first"
            )
    return ""


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev if os.major(status.st_dev) else 0, status.st_ino
