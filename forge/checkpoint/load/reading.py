"""A checkpoint, read and verified; into live tensors where there are such.

The steps of `read`, of which none changes anything that is live:

    manifest, sizes, state as JSON     verified, decoded with tensors that have no data
    `place`                            compares that with the live objects, offers their tensors
    tensors                            verified; those without an offer are read into fresh memory

`Checkpoint.fill` then reads the others to where they were offered a place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.format import manifest
from forge.checkpoint.format.codec import Outline, decode
from forge.checkpoint.format.manifest import Manifest
from forge.checkpoint.format.names import TENSORS, files_of
from forge.checkpoint.load.file_reading import CheckedFile
from forge.checkpoint.load.in_place import targets
from forge.checkpoint.load.tensor_reading import TensorFile, TensorFiles
from forge.checkpoint.ownership.trust import check_state_size
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem.steps import step_of

Place = Callable[[dict[str, Any]], Iterable[tuple[Any, torch.Tensor]] | None]
"""Takes a state whose tensors have no data; gives pairs of such a tensor and a live one for it.

None says that the state has to stay as it was read, because it will be loaded more than once.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """With live tensors where `place` offered them: they have their values after `fill`."""
    _owned: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    _tensors: TensorFiles | None = field(default=None, compare=False, repr=False)
    _pending: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def fill(self) -> frozenset[int]:
        """Read what belongs into live tensors, once.

        Returns:
            The `id` of tensors in `state` which whoever loads it may keep: nothing else refers to
            them.
        Raises:
            CheckpointError: Where that failed half-way.
        """
        if not self._pending:
            return self._owned
        assert self._tensors is not None
        try:
            self._tensors.read(self._pending, is_whole=False)
        except DamagedCheckpoint as error:
            raise CheckpointError(
                f"{self.path}: could be verified, but not be read again: {error}. The live objects"
                " now hold a part of it, so that training cannot continue with them. Start the job"
                " again."
            ) from error
        finally:
            self._pending.clear()
            self._tensors.close()
        return self._owned


def first_good(
    candidates: Iterable[Path], read_one: Callable[[Path], Checkpoint]
) -> tuple[Checkpoint | None, dict[Path, DamagedCheckpoint]]:
    """The first that verifies, if one does; and what is wrong with those before it."""
    passed_over: dict[Path, DamagedCheckpoint] = {}
    for path in candidates:
        try:
            return read_one(path), passed_over
        except DamagedCheckpoint as error:
            passed_over[path] = error
    return None, passed_over


def read(
    path: Path,
    place: Place | None = None,
    verify: Verify = Verify.full,
    *,
    rank: int = 0,
    size: int | None = None,
) -> Checkpoint:
    """Read one rank's part of the checkpoint in the directory `path`.

    Args:
        path: The directory.
        place: Offers live tensors, which `Checkpoint.fill` will overwrite; whatever it raises
            comes out of here, unless the checkpoint turns out to be damaged.
        verify: What is checked; its manifest and layout always are.
        rank: Whose part.
        size: Ranks that there are to be; None: any number.
    Raises:
        DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
        CheckpointError: Where it was saved by another number of ranks.
    """
    described = manifest.read(path)
    if step_of(path) not in (None, described.step):  # None: a copy of another name
        raise DamagedCheckpoint(f"its manifest is that of step {described.step}")
    if verify is not Verify.none:
        manifest.check_sizes(path, described)
    _check_ranks(path, described, size)
    state_file, tensor_file = files_of(rank)
    check_state_size(described, state_file)

    def opened(name: str) -> CheckedFile:
        return CheckedFile(path / name, described.files[name], is_checked=verify is Verify.full)

    text = opened(state_file).content()
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{state_file} cannot be read: {error}") from error
    # What a rank's own file lacks is what rank 0 has under the same name.
    files = [opened(name) for name in dict.fromkeys((tensor_file, TENSORS))]
    try:
        tensors = TensorFiles([TensorFile(file) for file in files])
        outline = Outline(tensors.outline)
        shown = decode(tree, outline)
        offers = place(shown) if place is not None else None
    except CheckpointError:
        for file in files:
            file.read([], is_whole=True)  # damage, if there is any, is what explains the rest
        raise
    placed = targets(outline, offers or ())
    values = _fresh(outline, placed)
    tensors.read(values, is_whole=True)
    values |= placed
    state = decode(tree, values)
    uses = outline.uses if offers is not None else Counter()
    owned = frozenset(id(value) for name, value in values.items() if uses[name] == 1)
    return Checkpoint(path, described, state, owned, tensors, placed)


def _fresh(outline: Outline, placed: Container[str]) -> dict[str, torch.Tensor]:
    """Memory for the tensors that are not placed, where they were when they were saved."""
    try:
        return {
            name: torch.empty_like(tensor, device=outline.devices.get(name, "cpu"))
            for name, tensor in outline.items()
            if name not in placed and name in outline.uses
        }
    except RuntimeError as error:  # or a header that asks for what nobody has
        raise DamagedCheckpoint(f"there is no memory to read it: {error}") from error


def _check_ranks(path: Path, described: Manifest, size: int | None) -> None:
    """Refuse what is no part of each rank, or of other ranks than there are."""
    names = {name for rank in range(described.world_size) for name in files_of(rank)}
    if described.files.keys() != names:
        raise DamagedCheckpoint(
            f"expected the files {', '.join(sorted(names)[:4])} in its manifest, found"
            f" {', '.join(sorted(described.files)[:4])}"
        )
    if size not in (None, described.world_size):
        raise CheckpointError(
            f"{path} was saved by {described.world_size} ranks, and this job has {size}. Start it"
            f" with {described.world_size}, or in a new directory."
        )
