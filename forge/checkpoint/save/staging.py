"""One rank's files of a checkpoint, before the checkpoint is published.

    claim      rank 0 claims the directory and creates a uniquely named work directory
    stage      each rank writes its own files into a folder of the work directory
    publish    rank 0 writes the manifest of all files last, then renames the folder

No step uses a collective, so that a background thread can save while training runs.
Other ranks know only the path of the work directory. Once a newer attempt has renamed it, that
path does not exist, and a rank of the old attempt cannot write any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint.format import tensorfile
from forge.checkpoint.format.codec import state_text
from forge.checkpoint.format.names import files_of
from forge.checkpoint.io.output import write_file
from forge.checkpoint.save.staging_pool import Snapshot
from forge.errors import CheckpointError


@dataclass(frozen=True)
class StagedPart:
    """The files that one rank has staged."""

    rank: int
    step: int
    files: dict[str, dict[str, Any]]
    """Name -> size and checksums, as in the manifest."""


def stage(
    folder: Path, snapshot: Snapshot, rank: int = 0, shared: Collection[str] = frozenset()
) -> StagedPart:
    """Write and sync a rank's files; `publish` syncs `folder` itself.

    Args:
        shared: Names of tensors to leave out, since rank 0 writes the same values.
    Raises:
        OSError: From the disk; FileNotFoundError if a newer attempt has taken over.
    """
    state, tensors = files_of(rank)
    text = state_text(snapshot.tree)
    content = snapshot.without(shared) if shared else snapshot.content
    with content.readers() as readers:
        written = write_file(folder / tensors, content.layout.size, readers)
    return StagedPart(
        rank,
        snapshot.step,
        {tensors: written, state: tensorfile.write_small(folder / state, text)},
    )


def merged(parts: Sequence[StagedPart], step: int) -> dict[str, dict[str, Any]]:
    """The files of all ranks.

    Raises:
        CheckpointError: Unless there is one part for each rank, all of this step.
    """
    found = [(part.rank, part.step) for part in parts]
    if found != [(rank, step) for rank in range(len(parts))] or not parts:
        raise CheckpointError(
            f"The parts of step_{step} do not belong together: expected one part of each rank,"
            f" found (rank, step) {found}"
        )
    return {name: entry for part in parts for name, entry in part.files.items()}
