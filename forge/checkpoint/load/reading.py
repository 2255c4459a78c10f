"""A checkpoint, read and verified; into live tensors where there are such.

The steps of `read`, of which none changes anything that is live:

    manifest, sizes, state as JSON     verified, decoded with tensors that have no data
    `place`                            compares that with the live objects, offers their tensors
    tensors                            verified; those without an offer are read into fresh memory

`Checkpoint.fill` then reads the others to where they were offered a place.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.format import manifest, shards
from forge.checkpoint.format.codec import decode
from forge.checkpoint.format.manifest import Manifest
from forge.checkpoint.format.names import files_of
from forge.checkpoint.format.outline import Outline
from forge.checkpoint.format.shards import Box
from forge.checkpoint.io.arena import in_huge_pages
from forge.checkpoint.load.file_reading import CheckedFile
from forge.checkpoint.load.in_place import Offers, shardings, targets
from forge.checkpoint.load.sources import RankFiles, Sources
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem.steps import step_of

Place = Callable[[dict[str, Any]], Offers | None]
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
    _tensors: Sources | None = field(default=None, compare=False, repr=False)
    _pending: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def differing(self, *prefixes: str) -> list[str]:
        """Names of tensors that another rank than 0 had otherwise, shards left out.

        To be asked before `fill`; none where the files that nobody reads are damaged.

        Args:
            prefixes: With one of which they begin.
        Returns:
            The names, each once.
        """
        assert self._tensors is not None
        with contextlib.suppress(DamagedCheckpoint):
            return [name for name in self._tensors.differing() if name.startswith(prefixes)]
        return []

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
    personal: Collection[str] = (),
) -> Checkpoint:
    """Read one rank's part of the checkpoint in the directory `path`.

    Where another number of ranks has saved it, each gets what rank 0 had, and of what was sharded
    the part that it is to hold now.

    Args:
        path: The directory.
        place: Offers live tensors, which `Checkpoint.fill` will overwrite; whatever it raises
            comes out of here, unless the checkpoint turns out to be damaged.
        verify: What is checked; its manifest and layout always are.
        rank: Whose part.
        size: Ranks that there are to be; None: as many as saved it.
        personal: Keys of the state that remain each rank's own where it was there already.
    Raises:
        DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
    """
    described = manifest.read(path)
    if step_of(path) not in (None, described.step):  # None: a copy of another name
        raise DamagedCheckpoint(f"its manifest is that of step {described.step}")
    if verify is not Verify.none:
        manifest.check_sizes(path, described)
    _check_ranks(described)

    def opened(name: str) -> CheckedFile:
        return CheckedFile(path / name, described.files[name], is_checked=verify is Verify.full)

    files = RankFiles(described, opened)
    try:
        is_resized = size not in (None, described.world_size)
        return _read(path, described, files, place, rank, personal if is_resized else None)
    except BaseException:
        files.close()
        raise


def _read(
    path: Path,
    described: Manifest,
    files: RankFiles,
    place: Place | None,
    rank: int,
    personal: Collection[str] | None,
) -> Checkpoint:
    """See `read`; `personal` is None where as many ranks have saved it."""
    is_resized = personal is not None
    base = 0 if is_resized else rank
    tree = files.tree(base)
    try:
        sources = Sources(files, base)
        if personal is not None and 0 < rank < described.world_size:
            prefix = f"rank {rank}: "
            own = files.tree(rank, prefix)
            tree |= {key: own[key] for key in personal if key in own}
            sources.include(rank, prefix)
        outline = Outline(sources.outline)
        shown = decode(tree, outline)
        offered = place(shown) if place is not None else None
        offers = list(offered or ())
        sharded = shardings(outline, offers)
        for name in {**outline.shards, **sharded}:
            shard = outline.shards.get(name)
            whole = Box.whole(shard.of if shard is not None else outline[name].shape)
            wanted = shards.shard_of(sharded[name]).box if name in sharded else whole
            outline[name] = sources.want(name, wanted, shard)
    except CheckpointError:
        files.verify()  # damage, if there is any, is what explains the rest
        raise
    placed = targets(outline, offers)
    devices = {**outline.devices, **{name: one.device for name, one in sharded.items()}}
    if is_resized:  # rank 0's device is not this one's
        devices = {name: torch.device(one.type) for name, one in devices.items()}
    values = _fresh(outline, placed, devices)
    sources.read(values, is_whole=True)
    for name in sharded.keys() & values.keys():
        values[name] = shards.wrapped(values[name], sharded[name])
    values |= placed
    state = decode(tree, values)
    uses = outline.uses if offered is not None else Counter()
    owned = frozenset(id(value) for name, value in values.items() if uses[name] == 1)
    pending = {name: shards.local(live) for name, live in placed.items()}
    return Checkpoint(path, described, state, owned, sources, pending)


def _fresh(
    outline: Outline, placed: Container[str], devices: Mapping[str, torch.device]
) -> dict[str, torch.Tensor]:
    """Memory for the tensors that are not placed."""
    try:
        return {
            name: in_huge_pages(torch.empty_like(tensor, device=devices.get(name, "cpu")))
            for name, tensor in outline.items()
            if name not in placed and name in outline.uses
        }
    except RuntimeError as error:  # or a header that asks for what nobody has
        raise DamagedCheckpoint(f"there is no memory to read it: {error}") from error


def _check_ranks(described: Manifest) -> None:
    """Refuse what is not the files of each rank."""
    names = {name for rank in range(described.world_size) for name in files_of(rank)}
    if described.files.keys() != names:
        raise DamagedCheckpoint(
            f"expected the files {', '.join(sorted(names)[:4])} in its manifest, found"
            f" {', '.join(sorted(described.files)[:4])}"
        )
