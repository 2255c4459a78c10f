"""Checkpoints: directories `step_<N>` that either verify or do not exist.

`codec` turns state into JSON and tensors, `tensorfile` holds the tensors in safetensors layout,
`manifest` says what a checkpoint consists of, `fence` who may write, `store` puts it together.
"""

from forge.checkpoint.manifest import Manifest
from forge.checkpoint.store import Checkpoint, Store

__all__ = ["Checkpoint", "Manifest", "Store"]
