"""A checkpoint, read and verified."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint import manifest, tensorfile
from forge.checkpoint.codec import decode
from forge.checkpoint.manifest import Manifest
from forge.checkpoint.names import STATE, TENSORS, step_of
from forge.config import Verify
from forge.errors import DamagedCheckpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]


def read(path: Path, verify: Verify) -> Checkpoint:
    """Read the checkpoint in the directory `path`.

    Raises:
        DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
    """
    described = manifest.read(path)
    if described.step != step_of(path):
        raise DamagedCheckpoint(f"its manifest is that of step {described.step}")
    if verify is not Verify.none:
        manifest.check_sizes(path, described)
    missing = {STATE, TENSORS} - described.files.keys()
    if missing:
        raise DamagedCheckpoint(f"its manifest lacks {', '.join(sorted(missing))}")
    raw = {
        name: tensorfile.read_bytes(path / name, entry, is_checked=verify is Verify.full)
        for name, entry in described.files.items()
    }
    tensors = tensorfile.parse(raw[TENSORS], TENSORS)
    try:
        state = decode(json.loads(tensorfile.to_bytes(raw[STATE])), tensors)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{STATE} cannot be read: {error}") from error
    return Checkpoint(path, described, state)
