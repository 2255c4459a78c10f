"""Files that are there after a power cut, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one step: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name.lstrip('.')}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace_link(path: Path, target: str) -> None:
    """Point the symlink at `path` to `target` in one step."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # os.replace alone: removing the old link first would leave none if we die here.
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
