"""Checkpoints: directories `step_<N>`, each either complete with checksums or absent.

`store` ties the folders together: claim a directory (`ownership`), copy and write the state
(`save`, in the layout of `format`), delete old checkpoints (`retention`), read one (`load`). The
names load on first use, so that `forge pin` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.checkpoint.format.manifest import Manifest
    from forge.checkpoint.load.reading import Checkpoint
    from forge.checkpoint.store import Store

__all__ = ["Checkpoint", "Manifest", "Store"]

_MODULES = {"Checkpoint": "load.reading", "Manifest": "format.manifest", "Store": "store"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"forge.checkpoint.{_MODULES[name]}"), name)
