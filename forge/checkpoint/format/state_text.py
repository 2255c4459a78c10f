"""The state of a rank without its tensors, as JSON, and its size limit."""

from __future__ import annotations

import json
from typing import Any

from forge.checkpoint.format.manifest import Manifest
from forge.errors import CheckpointError, DamagedCheckpoint

MAX_STATE_BYTES = 1 << 30
"""Size limit of the JSON: parsing takes many times as much memory."""


def state_text(tree: Any) -> bytes:
    """The JSON of an encoded state; CheckpointError if it is larger than a resume accepts."""
    text = json.dumps(tree).encode()
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"The state without its tensors is {len(text)} bytes of JSON; the limit is"
            f" {MAX_STATE_BYTES}. Let state_dict() return large lists as tensors."
        )
    return text


def check_state_size(described: Manifest, name: str) -> None:
    """Raise DamagedCheckpoint if the JSON in the file `name` is above the limit."""
    size = described.files[name]["size"]
    if size > MAX_STATE_BYTES:
        raise DamagedCheckpoint(
            f"{name}: expected at most {MAX_STATE_BYTES} bytes of JSON, found {size}"
        )
