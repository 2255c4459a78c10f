"""Locks on open files, that end with the processes that have them open (`flock`)."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}


def take_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Take the lock of an open file, without waiting; processes forked later hold it as well.

    A network disk without a lock manager has none to take; there, the token in the checkpoints'
    directory still keeps two jobs apart.

    Returns:
        False where another process holds it.
    """
    import fcntl  # not at the top: Windows has none

    try:
        fcntl.flock(fd, fcntl.LOCK_NB | (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def release_lock(fd: int) -> None:
    """Close the file; a process that was forked meanwhile holds the lock no more, either."""
    import fcntl

    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def is_in_place(fd: int, path: Path) -> bool:
    """Whether the file that is open is still the one that others would find."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False
