"""Checkpoints: directories `step_<N>` that either verify or do not exist.

`codec` turns state into JSON and tensors, `tensorfile` holds the tensors in safetensors layout,
`checksums` finds what has changed, `manifest` says what a checkpoint consists of, `fence` who may
write, `workspace` where, `retention` what is kept, `pins` what people keep; `reading` reads one
(`file_reading` its bytes, `tensor_reading` its tensors) while `in_use` holds it, `store` writes
them, `removal` takes them away; `inspection` looks at them from outside, `trust` at who could have
written them. Names load on first use: pins need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.checkpoint.manifest import Manifest
    from forge.checkpoint.reading import Checkpoint
    from forge.checkpoint.store import Store

__all__ = ["Checkpoint", "Manifest", "Store"]

_PLACES = {"Checkpoint": "reading", "Manifest": "manifest", "Store": "store"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"forge.checkpoint.{_PLACES[name]}"), name)
