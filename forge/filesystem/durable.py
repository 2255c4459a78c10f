"""Files and directories that are synced, so that they survive a power cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its file names survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """The descriptor of a new file, which is synced at the end of the `with` block."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and sync them."""
    made = [part for part in (path, *path.parents) if not part.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for part in made or [path]:  # an attempt that died before syncing can have created it
        with contextlib.suppress(PermissionError):  # a parent can be unreadable for us
            sync_directory(part.parent)


def replace_link(path: Path, target: str, work: Path) -> None:
    """Point the symlink at `path` to `target` in one step; `work` is for a temporary link."""
    temporary = work / path.name
    temporary.unlink(missing_ok=True)
    # os.replace alone: removing the old link first would leave none if we die here.
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
