"""Directories claimed by this process: forge creates no file in a directory that replaced one.

A user who can write to the parent of a directory can rename it, and put a link to one of our
private directories in its place. So the claim records the inode, which is compared before a file
is created below the path. The device number is compared as well for disks; network and overlay file
systems have another one after each mount. The directory stays open, since some file systems
renumber unused inodes. A directory that is missing does not count as replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

_claimed: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
"""Path -> (pid that opened the directory, its descriptor in that process), (device, inode)."""


def note(path: Path) -> None:
    """Record which directory is at `path` now.

    Raises:
        OSError: If there is no directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    forget(path)
    _claimed[str(path)] = (os.getpid(), fd), _identity(os.fstat(fd))


def forget(path: Path) -> None:
    """Drop the record of `path`."""
    opened, _ = _claimed.pop(str(path), (None, None))
    # In a forked child the descriptor number can belong to another file by now.
    if opened is not None and opened[0] == os.getpid():
        os.close(opened[1])


def problem(path: Path) -> str:
    """Why forge must not create `path`: a claimed parent directory was replaced; else empty."""
    text = str(path)
    for claimed, (_, before) in _claimed.items():
        if text != claimed and not text.startswith(claimed + os.sep):
            continue
        try:
            now = _identity(os.stat(claimed))
        except OSError:  # creating the file will raise
            continue
        if now != before:
            leads = f", a link to {os.path.realpath(claimed)}" if os.path.islink(claimed) else ""
            return (
                f"{claimed} was replaced by another directory while this job was running: its inode"
                f" was {before[1]} and is now {now[1]}{leads}. forge writes nothing there. If you"
                " moved or restored the directory yourself, start the job again; otherwise a user"
                " who can write to its parent directory has replaced it: restore the job's own"
                " directory first"
            )
    return ""


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev if os.major(status.st_dev) else 0, status.st_ino
