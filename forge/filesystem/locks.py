"""Locks on open files (`flock`), released when all processes that have the file open end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}


def take_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Lock an open file without waiting; processes forked later share the lock.

    On a network file system without locks this succeeds without locking; there the fencing token
    in the checkpoint directory still keeps two jobs apart.

    Returns:
        False if another process has locked the file.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_NB | (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def release_lock(fd: int) -> None:
    """Unlock and close the file, also for processes forked since, which share the lock."""
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def is_in_place(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False
