"""Checks of the node that need neither its GPUs nor another rank."""

from __future__ import annotations

import os

from forge.health.check import Context, Finding

_SHM = "/dev/shm"


def shm(context: Context) -> Finding | None:
    """Whether the workers of loaders have room for the batches that they hand over."""
    if not os.path.isdir(_SHM):
        return None
    found = os.statvfs(_SHM)
    free_gib = found.f_bavail * found.f_frsize / 2**30
    return Finding(
        f"{free_gib:.1f} GiB free in {_SHM}",
        is_failed=free_gib < context.threshold,
        remedy="Give the container more (`--shm-size`, `--ipc=host`), or remove what lies there.",
    )
