"""One rank's part of a checkpoint: its files, on disk, and no checkpoint yet.

    claim      one process: the fence, and a work directory with a name that only it gives
    stage      each rank: its own files, into a directory in there
    publish    the process with the claim: the manifest of all files last, then one rename

All of it is done by files and values, never by a collective: a thread does it, beside training.
Ranks without the claim know the directory by its claim's name alone. Once a newer attempt has taken
that away, an old rank has no name under which it could write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint.format import tensorfile
from forge.checkpoint.format.names import files_of
from forge.checkpoint.format.state_text import state_text
from forge.checkpoint.io.output import write_file
from forge.checkpoint.save.copies import Snapshot
from forge.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """What one rank has staged."""

    rank: int
    step: int
    files: dict[str, dict[str, Any]]
    """As in the manifest: name -> size and checksums."""


def stage(
    folder: Path, snapshot: Snapshot, rank: int = 0, shared: Collection[str] = frozenset()
) -> Part:
    """Write a rank's files, each synced; their names in `folder` are for `publish` to sync.

    Args:
        shared: Names of tensors that rank 0 writes with the very same values.
    Raises:
        OSError: From the disk; FileNotFoundError where a newer attempt has taken over.
    """
    state, tensors = files_of(rank)
    text = state_text(snapshot.tree)
    content = snapshot.without(shared) if shared else snapshot.content
    with content.readers() as readers:
        written = write_file(folder / tensors, content.layout.size, readers)
    return Part(
        rank,
        snapshot.step,
        {tensors: written, state: tensorfile.write_small(folder / state, text)},
    )


def merged(parts: Sequence[Part], step: int) -> dict[str, dict[str, Any]]:
    """The files of all ranks.

    Raises:
        CheckpointError: Where the parts are not one of each rank, and all of this step.
    """
    found = [(part.rank, part.step) for part in parts]
    if found != [(rank, step) for rank in range(len(parts))] or not parts:
        raise CheckpointError(
            f"The parts of step_{step} do not belong together: expected one of each rank, found"
            f" (rank, step) {found}"
        )
    return {name: entry for part in parts for name, entry in part.files.items()}
