"""Read and verify a checkpoint, then read it into live tensors if there are any.

The steps of `read`, which does not change any live object:

    manifest, sizes, state as JSON     verified, decoded with tensors that have no data
    `place`                            compares that with the live objects, offers their tensors
    tensors                            all verified; those without a live tensor are loaded

`Checkpoint.fill` then reads the others into the live tensors.
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
from forge.checkpoint.io.host_buffer import in_huge_pages
from forge.checkpoint.load.file_reading import CheckedFile
from forge.checkpoint.load.in_place import Offers, shardings, targets
from forge.checkpoint.load.sources import RankFiles, Sources
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.filesystem.steps import step_of

Place = Callable[[dict[str, Any]], Offers | None]
"""Takes a state whose tensors have no data; returns pairs of such a tensor and a live one for it.

It returns None if the state must not share memory with live tensors, since it is loaded again.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """Contains the live tensors that `place` offered; these have their values after `fill`."""
    _owned: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    _tensors: Sources | None = field(default=None, compare=False, repr=False)
    _pending: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def differing(self, *prefixes: str) -> list[str]:
        """Names of unsharded tensors that had other values on another rank than on rank 0.

        Call it before `fill`; empty if files that this rank does not read are damaged.

        Args:
            prefixes: Return only names that begin with one of these.
        Returns:
            The names, each once.
        """
        assert self._tensors is not None
        with contextlib.suppress(DamagedCheckpoint):
            return [name for name in self._tensors.differing() if name.startswith(prefixes)]
        return []

    def fill(self) -> frozenset[int]:
        """Read the tensors that `place` offered, once.

        Returns:
            The `id` of each tensor in `state` that `load_state_dict` can keep without a copy,
            since nothing else refers to it.
        Raises:
            CheckpointError: If reading failed, so that live tensors are half-loaded.
        """
        if not self._pending:
            return self._owned
        assert self._tensors is not None
        try:
            self._tensors.read(self._pending, is_whole=False)
        except DamagedCheckpoint as error:
            raise CheckpointError(
                f"{self.path} was verified, but reading it into the model and optimizer failed:"
                f" {error}. The model and optimizer are now only partly loaded, so training cannot"
                " continue. Start the job again."
            ) from error
        finally:
            self._pending.clear()
            self._tensors.close()
        return self._owned


def first_good(
    candidates: Iterable[Path], read_one: Callable[[Path], Checkpoint]
) -> tuple[Checkpoint | None, dict[Path, DamagedCheckpoint]]:
    """The first checkpoint that verifies, or None; and the errors of those before it."""
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

    If the number of ranks has changed, each rank gets the state of rank 0, and of sharded tensors
    the part that it has now.

    Args:
        path: The directory.
        place: Offers live tensors, which `Checkpoint.fill` overwrites. Its exceptions are raised
            here, unless the checkpoint turns out to be damaged.
        verify: What to verify; the manifest and the layout always are.
        rank: The rank whose part is read.
        size: The number of ranks now; None: as many as saved the checkpoint.
        personal: Keys of the state that each rank that existed before keeps for itself.
    Raises:
        DamagedCheckpoint: Names the damaged file, what was expected and what was found.
    """
    described = manifest.read(path)
    if step_of(path) not in (None, described.step):  # None: a copy under another name
        raise DamagedCheckpoint(
            f"expected the manifest of step {step_of(path)}, found that of step {described.step}"
        )
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
    """See `read`; `personal` is None if the number of ranks has not changed."""
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
        files.verify()  # if the files are damaged, that is the cause of the error
        raise
    placed = targets(outline, offers)
    devices = {**outline.devices, **{name: one.device for name, one in sharded.items()}}
    if is_resized:  # the state is rank 0's, with rank 0's device index
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
    """Empty tensors for those without a live tensor."""
    try:
        return {
            name: in_huge_pages(torch.empty_like(tensor, device=devices.get(name, "cpu")))
            for name, tensor in outline.items()
            if name not in placed and name in outline.uses
        }
    except RuntimeError as error:  # too little memory, or a damaged header asks for too much
        raise DamagedCheckpoint(f"there is not enough memory to read it: {error}") from error


def _check_ranks(described: Manifest) -> None:
    """Raise DamagedCheckpoint unless the manifest names the files of each rank and no others."""
    names = {name for rank in range(described.world_size) for name in files_of(rank)}
    if described.files.keys() != names:
        missing, extra = sorted(names - set(described.files)), sorted(set(described.files) - names)
        differences = [f"does not name {', '.join(missing[:4])}"] if missing else []
        differences += [f"names the unexpected {', '.join(extra[:4])}"] if extra else []
        raise DamagedCheckpoint(
            f"its manifest is for {described.world_size} ranks, but {' and '.join(differences)}"
        )
