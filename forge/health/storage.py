"""Checks of file systems: that of the checkpoint directory, and /dev/shm."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forge import messages
from forge.errors import DiskFull, is_disk_full
from forge.health.check import Context, Finding
from forge.jobdir.job_files import step_dirs

_GIB = 2**30
_MIN_CHECKPOINTS = 2
"""A checkpoint is written before an older one is removed. Our own limit: others check the share of
the disk in use (NVRx, gcm and imbue: 83 to 95 %), which means little on a large disk."""
_MIN_INODES = 10_000
"""Our own limit: a checkpoint needs a few inodes for each rank."""
_SHM = "/dev/shm"
_MIN_SHM_GIB = 1.0
"""Our own limit: with Docker's 64 MB, DataLoader workers die of SIGBUS (PyTorch issue 5040)."""


def disk(context: Context) -> Finding:
    """Whether a file can be written in the checkpoint directory; little free space only warns.

    NVRx and gcm write the same amount (4 KB).

    Raises:
        DiskFull: If there is no space even for this file.
    """
    place = _there(context.checkpoint_dir)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".step_health_") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{place} cannot be written: {error}"
        if is_disk_full(error):
            raise DiskFull(text) from error
        is_late = error.errno == errno.ETIMEDOUT  # of a server that all nodes share
        remedy = "Change its permissions, or save elsewhere (`resilience.checkpoint.dir`)."
        return Finding(text, is_failed=True, only_warns=is_late, remedy=remedy)
    system = os.statvfs(place)
    free = system.f_bavail * system.f_frsize
    problems = [*_little_room(context, system, free), *_few_inodes(place, system)]
    return Finding(
        "; ".join(problems) or f"{messages.size(free)} free in {place}",
        is_failed=bool(problems),
        only_warns=True,
        remedy="Free some space, keep fewer checkpoints (`resilience.checkpoint.keep_last`), or"
        " save elsewhere (`resilience.checkpoint.dir`).",
    )


def _little_room(context: Context, system: os.statvfs_result, free: int) -> Iterator[str]:
    """A problem if few more checkpoints fit, of the size of the newest one or of the state."""
    size = _newest_bytes(context.checkpoint_dir) or context.state_bytes
    # A tmpfs without a limit, or a file system that does not report it, has 0 blocks.
    if size and system.f_blocks and free / size < _MIN_CHECKPOINTS:
        yield (
            f"space for {free / size:.1f} more checkpoints of {messages.size(size)}, less than"
            f" {_MIN_CHECKPOINTS} ({messages.size(free)} free)"
        )


def _newest_bytes(checkpoint_dir: Path) -> int:
    """The size of the newest checkpoint; 0 without one."""
    try:
        newest = next(iter(step_dirs(checkpoint_dir)), None)
        if newest is None:
            return 0
        with os.scandir(newest) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:  # retention is removing it; the next round finds another one
        return 0


def _few_inodes(place: Path, system: os.statvfs_result) -> Iterator[str]:
    if system.f_files and system.f_favail < _MIN_INODES:  # btrfs and others report 0 files
        yield f"{system.f_favail} free inodes in {place}, less than {_MIN_INODES}"


def _there(path: Path) -> Path:
    """The path itself if it exists, otherwise its nearest parent that does."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def shm(context: Context) -> Finding | None:
    """Whether DataLoader workers have enough shared memory to pass their batches on."""
    if not os.path.isdir(_SHM):
        return None
    system = os.statvfs(_SHM)
    if not system.f_blocks:  # a tmpfs without a limit
        return None
    free_gib = system.f_bavail * system.f_frsize / _GIB
    is_failed = free_gib < _MIN_SHM_GIB
    return Finding(
        f"{free_gib:.2f} GiB free in {_SHM}" + (f", less than {_MIN_SHM_GIB:g} GiB" * is_failed),
        is_failed=is_failed,
        remedy="Give the container more (`--shm-size`, `--ipc=host`), or delete files in /dev/shm.",
    )
