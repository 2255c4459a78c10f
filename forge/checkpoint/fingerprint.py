"""A hash of a state, to compare two without keeping both."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from forge.checkpoint.format.codec import Encoder
from forge.checkpoint.host_memory import digest


def fingerprint(state: Any) -> str:
    """A hash that is equal for equal values.

    Raises:
        CheckpointError: If the state cannot be saved; names the leaf.
    """
    encoder = Encoder()
    found = hashlib.blake2b(json.dumps(encoder.encode(state)).encode(), digest_size=16)
    for name, tensor in encoder.tensors.items():
        found.update(f"{name} {digest(tensor)}".encode(errors="replace"))
    return found.hexdigest()
