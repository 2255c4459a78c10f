"""Checkpoints: directories `step_<N>` that either verify or do not exist.

`codec` turns state into JSON and tensors, `tensorfile` holds the tensors in safetensors layout,
`checksums` finds what has changed, `manifest` says what a checkpoint consists of, `fence` who may
write, `retention` what is kept; `reading` reads one (`file_reading` its bytes, `tensor_reading`
its tensors), `store` writes them.
"""

from forge.checkpoint.manifest import Manifest
from forge.checkpoint.reading import Checkpoint
from forge.checkpoint.store import Store

__all__ = ["Checkpoint", "Manifest", "Store"]
