"""Checks of the node that need neither its GPUs nor another rank."""

from __future__ import annotations

import os

from forge.health.check import Context, Finding

_SHM = "/dev/shm"
_GIB = 2**30


def shm(context: Context) -> Finding | None:
    """Whether the workers of loaders have room for the batches that they hand over."""
    if not os.path.isdir(_SHM):
        return None
    found = os.statvfs(_SHM)
    if not found.f_blocks:  # a tmpfs without a limit
        return None
    free_gib = found.f_bavail * found.f_frsize / _GIB
    return Finding(
        f"{free_gib:.2f} GiB free in {_SHM}",
        is_failed=context.is_below(free_gib),
        remedy="Give the container more (`--shm-size`, `--ipc=host`), or remove what lies there.",
    )
