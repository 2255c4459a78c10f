"""The built-in health checks, in the order in which they run."""

from __future__ import annotations

from forge.health import gpu_driver, gpu_memory, peers, product, storage
from forge.health.check import Check, Scope

CHECKS: tuple[Check, ...] = (
    Check("disk", storage.disk, Scope.node, is_passive=True),
    Check("shm", storage.shm, Scope.node, is_passive=True),
    # The driver checks come first: a product on a GPU that is gone might never return.
    Check("gpu_memory", gpu_memory.gpu_memory, Scope.task, is_passive=True),
    Check("gpu_driver", gpu_driver.gpu_driver, Scope.task, is_passive=True, is_doubtful=True),
    Check("gpu", product.gpu, Scope.task),
    Check("ranks", peers.ranks, Scope.ranks),
)
"""Their names are the keys of `health.checks`."""
