"""The lock on a checkpoint directory: two files, each covering a case that the other does not.

    `.lock`        POSIX (`fcntl.lockf`): forked children do not inherit it. It is lost when this
                   process closes any descriptor of the file, for example after copying the
                   directory or hashing its files; the next check takes it again.
    `.lock.kept`   `flock`: held until its own descriptor is closed. Children that Python forks
                   close theirs immediately: an orphaned child does not keep the lock.

There are two files because NFS maps both kinds to the same lock and would refuse the second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from forge import messages
from forge.filesystem.files import open_file
from forge.filesystem.locks import is_in_place, release_lock

LOCK_FILE = ".lock"
KEPT_FILE = ".lock.kept"

_open_here: set[Locks] = set()


class Locks:
    """The two locks of one directory; `take` opens their files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}
        self._has_warned = False

    def take(self) -> str | None:
        """Take both locks, or take a lost one again; without locks only the token protects.

        This reopens lock files that were replaced: the directory can have been restored from a
        copy.

        Returns:
            The file that another process has locked, or None.
        """
        _open_here.add(self)
        for name in (LOCK_FILE, KEPT_FILE):  # a fixed order, so that one of two starters gets both
            path = self._directory / name
            if name in self._fds and not is_in_place(self._fds[name], path):
                os.close(self._fds.pop(name))
            if name not in self._fds:
                self._fds[name] = open_file(path, os.O_RDWR | os.O_CREAT)
            lock = fcntl.lockf if name == LOCK_FILE else fcntl.flock
            try:
                lock(self._fds[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return name
            except OSError as error:
                self._warn(error)
        return None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            messages.warn(
                f"{self._directory}: the file system does not support file locks"
                f" ({error.strerror}). If two jobs start in this directory at the same time, forge"
                " notices only at the next save; and retention can remove a checkpoint while"
                " another process reads it: pin a checkpoint (`forge pin`) before reading it."
            )

    def release(self) -> None:
        """Release both locks."""
        kept = self._fds.pop(KEPT_FILE, None)
        if kept is not None:  # unlock explicitly: children that C code forked share the descriptor
            with contextlib.suppress(OSError):
                release_lock(kept)
        self.close()

    def close(self) -> None:
        """Close the files; another process that has them open keeps the lock."""
        _open_here.discard(self)
        while self._fds:
            _, fd = self._fds.popitem()
            with contextlib.suppress(OSError):  # the descriptor was closed, so the lock is gone
                os.close(fd)


def _close_in_child() -> None:
    for locks in list(_open_here):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
