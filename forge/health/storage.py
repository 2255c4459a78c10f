"""Checks of the file system that the checkpoints go to."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from forge.errors import DiskFull, is_disk_full
from forge.filesystem.steps import step_dirs
from forge.health.check import Context, Finding

_GIB = 2**30


def disk(context: Context) -> Finding:
    """Whether the checkpoint directory takes a synced file, and has room.

    Raises:
        DiskFull: Where not even that file has room.
    """
    place = _there(context.checkpoint_dir)
    remedy = "Make room, or save elsewhere (`resilience.checkpoint.dir`)."
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".step_health_") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free_gib = shutil.disk_usage(place).free / _GIB
    except OSError as error:
        text = f"{place} cannot be written: {error}"
        if is_disk_full(error):
            raise DiskFull(text) from error
        return Finding(text, is_failed=True, remedy=remedy)
    value = f"{free_gib:.1f} GiB free in {place}"
    return Finding(value, is_failed=context.is_below(free_gib), remedy=remedy)


def room(context: Context) -> Finding | None:
    """Whether a few more checkpoints fit, as large as the newest one, or as the live state."""
    size = newest_bytes(context.checkpoint_dir) or context.state_bytes
    if not size:
        return None
    total, _, free = shutil.disk_usage(_there(context.checkpoint_dir))
    if not total:  # a tmpfs without a limit, or a file system that does not say
        return None
    return Finding(
        f"room for {free / size:.1f} more checkpoints of {size / _GIB:.2f} GiB"
        f" ({free / _GIB:.1f} GiB free)",
        is_failed=context.is_below(free / size),
        remedy="Make room, keep fewer (`resilience.checkpoint.keep_last`), or save elsewhere.",
    )


def newest_bytes(checkpoint_dir: Path) -> int:
    """The size of the newest checkpoint; 0 without one."""
    try:
        newest = next(iter(step_dirs(checkpoint_dir)), None)
        if newest is None:
            return 0
        with os.scandir(newest) as files:
            return sum(one.stat(follow_symlinks=False).st_size for one in files)
    except OSError:  # retention removes it at this moment; the next look finds another one
        return 0


def inodes(context: Context) -> Finding | None:
    """Whether the file system can hold as many more files."""
    found = os.statvfs(_there(context.checkpoint_dir))
    if not found.f_files:  # btrfs and others make them as they are needed
        return None
    return Finding(
        f"{found.f_favail} free inodes in {context.checkpoint_dir}",
        is_failed=context.is_below(found.f_favail),
        remedy="Remove files there, many small ones above all: `df -i` shows how many there are.",
    )


def _there(path: Path) -> Path:
    """The first directory that exists, from there upwards."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
