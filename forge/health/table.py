"""The built-in health checks, in the order in which they run.

Checks of GPUs and of several ranks load their code only in a task that has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from forge.health import storage
from forge.health.check import Check, Context, Finding, Scope

_Look = Callable[[Context], Finding | None]


def _found(module: str, name: str) -> _Look:
    look: _Look = getattr(importlib.import_module(f"forge.health.{module}"), name)
    return look


def _of_gpus(module: str, name: str) -> _Look:
    return lambda context: _found(module, name)(context) if context.devices else None


def _of_ranks(context: Context) -> Finding | None:
    return _found("peers", "ranks")(context) if context.ranks.size > 1 else None


CHECKS: tuple[Check, ...] = (
    Check("disk", storage.disk, Scope.node, is_passive=True),
    Check("shm", storage.shm, Scope.node, is_passive=True),
    # The driver checks come first: a product on a GPU that is gone might never return.
    Check("gpu_memory", _of_gpus("gpu_memory", "gpu_memory"), Scope.task, is_passive=True),
    Check(
        "gpu_driver",
        _of_gpus("gpu_driver", "gpu_driver"),
        Scope.task,
        is_passive=True,
        is_doubtful=True,
    ),
    Check("gpu", _of_gpus("product", "gpu"), Scope.task),
    Check("ranks", _of_ranks, Scope.ranks),
)
"""Their names are the keys of `health.checks`."""
