"""The built-in health checks, in the order in which they are made."""

from __future__ import annotations

from forge.health import gpu, gpu_memory, host, peers, product, storage
from forge.health.check import Check, Scope

CHECKS: tuple[Check, ...] = (
    Check("disk", storage.disk, Scope.node),
    Check("inodes", storage.inodes, Scope.node, is_passive=True),
    Check("room", storage.room, Scope.node, is_passive=True),
    Check("shm", host.shm, Scope.node, is_passive=True),
    # By the driver first: a product on a GPU that is gone may not return.
    Check("gpu_memory", gpu_memory.gpu_memory, Scope.task, is_passive=True),
    Check("ecc", gpu.ecc, Scope.task, is_passive=True, is_doubtful=True),
    Check("row_remap", gpu.row_remap, Scope.task, is_passive=True, is_doubtful=True),
    Check("recovery_action", gpu.recovery_action, Scope.task, is_passive=True),
    Check("gpu", product.gpu, Scope.task, is_doubtful=True),
    Check("shared_directory", peers.shared_directory, Scope.ranks),
    Check("collective", peers.collective, Scope.ranks),
)
"""Their names are the keys of `health.checks`."""
