"""The lock on a directory: two, of which each holds where the other does not.

    `.lock`        POSIX (`fcntl.lockf`): forked children do not inherit it. It is lost as soon as
                   this process closes any descriptor of the file, as copying the directory or
                   hashing its files does; it is taken again at the next look.
    `.lock.kept`   `flock`: it holds until its own descriptor is closed. Children that Python forks
                   close theirs as they begin: one that outlives a killed parent keeps nothing.

Two files, because NFS makes of both kinds the same one, and would refuse the second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from forge import messages
from forge.filesystem.files import open_file

if sys.platform != "win32":
    import fcntl

LOCK_FILE = ".lock"
KEPT_FILE = ".lock.kept"

_open_here: set[Locks] = set()


class Locks:
    """The two locks of one directory, each open from the first `take` on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}

    def take(self) -> str | None:
        """Take both, on the files that are there now.

        Returns:
            The file that somebody else has locked; None: both are ours, or there are no locks.
        """
        before, self._fds = self._fds, {}
        for fd in before.values():  # first: of the same file, it would end the new lock
            os.close(fd)
        return self._take()

    def take_again(self) -> None:
        """Take what was lost, or was somebody's before; who has it now, the token tells."""
        self._take()

    def _take(self) -> str | None:
        if sys.platform == "win32":
            return None
        _open_here.add(self)
        for name in (LOCK_FILE, KEPT_FILE):  # in this order: of two that begin, one gets both
            is_new = name not in self._fds
            if is_new:
                self._fds[name] = open_file(self._directory / name, os.O_RDWR | os.O_CREAT)
            lock = fcntl.lockf if name == LOCK_FILE else fcntl.flock
            try:
                lock(self._fds[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return name
            except OSError as error:
                if name == LOCK_FILE and is_new:  # the token alone has to do
                    messages.warn(
                        f"{self._directory}: the file system keeps no locks ({error.strerror}). Two"
                        " jobs started in this directory at the same time would not notice at once."
                    )
        return None

    def are_in_place(self) -> bool:
        """Whether the files that are locked are those that others would find."""
        try:
            return all(
                os.path.samestat(os.stat(self._directory / name), os.fstat(fd))
                for name, fd in self._fds.items()
            )
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let go of both."""
        if sys.platform != "win32" and KEPT_FILE in self._fds:
            with contextlib.suppress(OSError):  # what C code forked has the descriptor, too
                fcntl.flock(self._fds[KEPT_FILE], fcntl.LOCK_UN)
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
