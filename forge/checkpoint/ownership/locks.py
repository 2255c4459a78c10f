"""The lock on a directory: two, of which each holds where the other does not.

    `.lock`        POSIX (`fcntl.lockf`): forked children do not inherit it. It is lost as soon as
                   this process closes any descriptor of the file, as copying the directory or
                   hashing its files does; it is taken again at the next check.
    `.lock.kept`   `flock`: it holds until its own descriptor is closed. Children that Python forks
                   close theirs as they begin: one that outlives a killed parent keeps nothing.

Two files, because NFS makes of both kinds the same one, and would refuse the second.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from forge import messages
from forge.filesystem.files import open_file
from forge.filesystem.locks import is_in_place, release_lock

LOCK_FILE = ".lock"
KEPT_FILE = ".lock.kept"

_open_here: set[Locks] = set()


class Locks:
    """The two locks of one directory, each open from the first `take` on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}
        self._has_warned = False

    def take(self) -> str | None:
        """Take both, or again what was lost; where there are no locks the token has to do.

        They are taken on the files that are there now: the directory may be another one, restored
        from a copy.

        Returns:
            The file that somebody else has locked; None where it is neither.
        """
        import fcntl  # not at the top: Windows has none

        _open_here.add(self)
        for name in (LOCK_FILE, KEPT_FILE):  # in this order: of two that begin, one gets both
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
                f"{self._directory}: the file system keeps no locks ({error.strerror}). Two jobs"
                " started in this directory at the same time would not notice at once, and a"
                " checkpoint may be removed while another process reads it: pin it before"
                " (`forge pin`)."
            )

    def release(self) -> None:
        """Let go of both."""
        kept = self._fds.pop(KEPT_FILE, None)
        if kept is not None:  # what C code forked has the descriptor, too
            with contextlib.suppress(OSError):
                release_lock(kept)
        self.close()

    def close(self) -> None:
        """Close the files; whoever else has them open keeps the lock."""
        _open_here.discard(self)
        while self._fds:
            _, fd = self._fds.popitem()
            with contextlib.suppress(OSError):  # the descriptor, and the lock with it, is gone
                os.close(fd)


def _close_in_child() -> None:
    for locks in list(_open_here):
        locks.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
