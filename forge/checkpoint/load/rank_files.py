"""The files of all ranks of a checkpoint: which of them has which part of a tensor.

A rank's file has the tensors that differ from rank 0's; all others are read from rank 0's file,
under the same name. If the sharding has changed, a shard is assembled from all saved shards that
it overlaps. Only the needed files are opened, and every opened file is verified.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from forge.checkpoint.format.codec import MAX_STATE_BYTES
from forge.checkpoint.format.manifest import Manifest, files_of
from forge.checkpoint.format.shards import Box, Shard
from forge.checkpoint.format.tensorfile import Entry
from forge.checkpoint.host_memory import flat
from forge.checkpoint.load.checked_file import CheckedFile, Target, TensorsFile
from forge.errors import DamagedCheckpoint

_File = TypeVar("_File", bound=CheckedFile)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that one file has."""

    file: TensorsFile
    entry: Entry
    box: Box
    """The part of the whole tensor that is in this file."""
    common: Box
    """The part of `box` that the reader needs."""


class Destination(NamedTuple):
    """Contiguous memory for a box of a tensor, and where the bytes come from."""

    memory: torch.Tensor
    box: Box
    pieces: list[Piece]


class RankFiles:
    """The files in the directory of a checkpoint, each opened on first use.

    Args:
        path: The directory.
        described: Its manifest.
        is_checked: Whether to verify checksums.
    """

    def __init__(self, path: Path, described: Manifest, *, is_checked: bool = True) -> None:
        self._path = path
        self._described = described
        self._is_checked = is_checked
        self._trees: dict[int, Any] = {}
        self._tensors: dict[int, TensorsFile] = {}

    def tree(self, rank: int) -> Any:
        """A rank's state as JSON."""
        if rank not in self._trees:
            name, _ = files_of(rank)
            size = self._described.files[name]["size"]
            if size > MAX_STATE_BYTES:
                raise DamagedCheckpoint(
                    f"{name}: expected at most {MAX_STATE_BYTES} bytes of JSON, found {size}"
                )
            with contextlib.closing(self._opened(name, CheckedFile)) as file:
                content = file.content()
            try:
                self._trees[rank] = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise DamagedCheckpoint(f"{name} cannot be read: {error}") from error
        return self._trees[rank]

    def tensors(self, rank: int) -> TensorsFile:
        """A rank's tensors' file."""
        if rank not in self._tensors:
            self._tensors[rank] = self._opened(files_of(rank)[1], TensorsFile)
        return self._tensors[rank]

    def _opened(self, name: str, kind: type[_File]) -> _File:
        entry = self._described.files[name]
        return kind(self._path / name, entry, is_checked=self._is_checked)

    def find(self, rank: int, name: str) -> tuple[TensorsFile, Entry]:
        """A tensor of a rank: in its own file, or in that of rank 0."""
        for one in (rank, 0):
            if name in self.tensors(one).entries:
                return self.tensors(one), self.tensors(one).entries[name]
        raise DamagedCheckpoint(f"{files_of(rank)[1]} has no tensor {name!r}")

    @functools.cached_property
    def shards(self) -> dict[str, list[tuple[int, Shard]]]:
        """Name of a sharded tensor -> (rank, its shard), for all ranks."""
        found: dict[str, list[tuple[int, Shard]]] = {}
        for rank in range(self._described.world_size):
            try:
                own = {name: Shard.from_json(one) for name, one in _shards(self.tree(rank))}
            except (LookupError, TypeError, ValueError) as error:
                raise DamagedCheckpoint(f"{files_of(rank)[0]} cannot be read: {error!r}") from error
            for name, shard in own.items():
                found.setdefault(name, []).append((rank, shard))
        return found

    def pieces(self, rank: int, name: str, box: Box, shard: Shard | None) -> list[Piece]:
        """What to read for a box of a rank's tensor.

        Args:
            box: Of the whole tensor.
            shard: The rank's shard when it was saved; None: it had the whole tensor.
        Raises:
            DamagedCheckpoint: If the ranks' files do not cover the whole box.
        """
        if not box.numel:
            return []
        file, entry = self.find(rank, name)
        own = Box.whole(entry.shape) if shard is None else shard.box
        if box == own or own.common(box) == box:
            return [Piece(file, entry, own, box)]
        pieces = list(self._overlaps(name, box, shard))
        found = sum(piece.common.numel for piece in pieces)
        if found != box.numel:
            raise DamagedCheckpoint(
                f"{name}: expected {box.numel} elements in the files of all ranks together, found"
                f" {found}"
            )
        return pieces

    def _overlaps(self, name: str, box: Box, shard: Shard | None) -> Iterator[Piece]:
        seen: set[Box] = set()  # read only one of several replicas
        for rank, other in self.shards.get(name, []):
            common = other.box.common(box)
            if shard is None or other.of != shard.of or common is None or common in seen:
                continue
            seen.add(common)
            file, entry = self.find(rank, name)
            if entry.shape != other.box.shape:
                raise DamagedCheckpoint(
                    f"{file.name}: the tensor {name} has shape {list(entry.shape)}, but the state"
                    f" of its rank says {list(other.box.shape)}"
                )
            yield Piece(file, entry, other.box, common)

    def read(self, destinations: Iterable[Destination]) -> None:
        """Read tensors; the first call verifies all open files.

        Raises:
            DamagedCheckpoint: If that failed; the content of the memory is then undefined.
        """
        targets: dict[TensorsFile, list[Target]] = {one: [] for one in self._tensors.values()}
        scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        for one in destinations:
            for piece in one.pieces:
                begin, memory = 0, one.memory
                if piece.box != one.box:
                    inside = piece.common.seen_from(piece.box)
                    first = inside.begin_in(piece.box.shape)
                    memory = memory[piece.common.seen_from(one.box).slices()]
                    if first is None or not memory.is_contiguous():
                        whole = torch.empty(piece.box.shape, dtype=memory.dtype, device="cpu")
                        scattered.append((memory, whole[inside.slices()]))
                        memory = whole
                    else:
                        begin = first * memory.element_size()
                targets[piece.file].append(Target(piece.entry.begin + begin, flat(memory)))
        for file, some in targets.items():
            if some or not file.is_verified:
                file.read(some)
        for memory, content in scattered:
            memory.copy_(content)

    def verify(self) -> None:
        """Verify all open files.

        Raises:
            DamagedCheckpoint: If bytes have changed.
        """
        self.read([])

    def differing(self) -> list[str]:
        """Names of unsharded tensors that are in the file of another rank than 0."""
        ranks = range(1, self._described.world_size)
        names = dict.fromkeys(name for rank in ranks for name in self.tensors(rank).entries)
        return [name for name in names if name not in self.shards]

    def close(self) -> None:
        """Close all open files."""
        for one in self._tensors.values():
            one.close()


def _shards(tree: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(tree, dict):
        if "!shard" in tree:
            yield tree["part"]["!tensor"], tree["!shard"]
        for one in tree.values():
            yield from _shards(one)
    elif isinstance(tree, list):
        for one in tree:
            yield from _shards(one)
