"""Checkpoints that somebody reads: held by a shared lock on the manifest, which removing respects.

`flock`, because the locks of `fcntl.lockf` end as soon as their process closes any descriptor of
the same file, and reading the manifest does that. Where the file system keeps no locks everything
does without, and a warning says so once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from forge import messages
from forge.checkpoint.format import manifest

if sys.platform != "win32":
    import fcntl

PATIENCE_S = 1.0
"""Seconds a reader waits for whoever is about to remove what it wants to read."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_warned: list[Path] = []


@contextlib.contextmanager
def reading_lock(path: Path) -> Iterator[None]:
    """Keep the checkpoint in the directory `path` from being removed while it is read.

    Where there is nothing to lock, or no way to, this does nothing: reading tells what is wrong.
    """
    fd = _lock_shared(path)
    try:
        yield
    finally:
        _unlock(fd)


@contextlib.contextmanager
def removing_lock(path: Path) -> Iterator[bool]:
    """Keep readers away from the checkpoint in `path`; yields False while somebody reads it."""
    fd = _open(path, os.O_RDWR)  # an exclusive lock on NFS asks for a file open for writing
    try:
        yield fd is None or _flock(fd, path, is_exclusive=True)
    finally:
        _unlock(fd)


def _lock_shared(path: Path) -> int | None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        fd = _open(path, os.O_RDONLY)
        if fd is None:
            return None
        if _flock(fd, path, is_exclusive=False) and _is_there(fd, path):
            return fd
        _unlock(fd)  # removed or replaced between opening and locking
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def _open(path: Path, mode: int) -> int | None:
    """The manifest, open; None where there is no plain file that can be opened."""
    if sys.platform == "win32":
        return None
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path / manifest.NAME, mode | flags)
    except OSError:
        return None if mode == os.O_RDONLY else _open(path, os.O_RDONLY)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _flock(fd: int, path: Path, *, is_exclusive: bool) -> bool:
    """Whether the lock was got, or there are no locks here."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_NB | (fcntl.LOCK_EX if is_exclusive else fcntl.LOCK_SH))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not _warned:
            _warned.append(path)
            messages.warn(
                f"{path.parent}: the file system keeps no locks ({error.strerror}). A checkpoint"
                " may be removed while another process reads it: pin it before (`forge pin`)."
            )
    return True


def _is_there(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path / manifest.NAME))
    except OSError:
        return False


def _unlock(fd: int | None) -> None:
    if fd is None or sys.platform == "win32":
        return
    try:
        # A process that was forked meanwhile has the descriptor too, and with it the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
