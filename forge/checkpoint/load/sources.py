"""Finds the source of each tensor: one rank's file, or pieces of several ranks' files.

A rank's file has the tensors that differ from rank 0's; all others are read from rank 0's file,
under the same name. If the sharding has changed, a shard is assembled from all saved shards that
it overlaps. Only the needed files are opened, and every opened file is verified.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge.checkpoint.format import codec
from forge.checkpoint.format.manifest import Manifest
from forge.checkpoint.format.names import files_of
from forge.checkpoint.format.shards import Box, Shard
from forge.checkpoint.io.copying import flat
from forge.checkpoint.load.file_reading import CheckedFile, Target
from forge.checkpoint.load.tensor_reading import TensorFile
from forge.errors import DamagedCheckpoint


class RankFiles:
    """The files of all ranks of a checkpoint, each opened on first use.

    Args:
        described: The checkpoint's manifest.
        opened: Opens a file by its name.
    """

    def __init__(self, described: Manifest, opened: Callable[[str], CheckedFile]) -> None:
        self._described = described
        self.num_ranks = described.world_size
        self._opened = opened
        self._texts: dict[int, bytes] = {}
        self._files: list[CheckedFile] = []
        self.tensors: dict[int, TensorFile] = {}
        """Rank -> its tensors' file, if it was opened."""

    def tree(self, rank: int, prefix: str = "") -> Any:
        """A rank's state as JSON.

        Args:
            prefix: Prepended to the names of its tensors.
        """
        name, _ = files_of(rank)
        if rank not in self._texts:
            size = self._described.files[name]["size"]
            if size > codec.MAX_STATE_BYTES:
                raise DamagedCheckpoint(
                    f"{name}: expected at most {codec.MAX_STATE_BYTES} bytes of JSON, found {size}"
                )
            self._texts[rank] = self._opened(name).content()

        def hook(value: dict[str, Any]) -> dict[str, Any]:
            if prefix and isinstance(value.get("!tensor"), str):
                value["!tensor"] = prefix + value["!tensor"]
            return value

        try:
            return json.loads(self._texts[rank], object_hook=hook if prefix else None)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error}") from error

    def file(self, rank: int) -> TensorFile:
        """A rank's tensors' file."""
        if rank not in self.tensors:
            self._files.append(self._opened(files_of(rank)[1]))
            self.tensors[rank] = TensorFile(self._files[-1])
        return self.tensors[rank]

    def verify(self) -> None:
        """Verify the checksums of all open tensors' files.

        Raises:
            DamagedCheckpoint: If bytes have changed.
        """
        for one in self._files:
            one.read([], is_whole=True)

    def close(self) -> None:
        """Close all open files."""
        for one in self._files:
            one.close()

    def holder(self, rank: int, name: str) -> TensorFile:
        """The file with a rank's tensor of this name: its own, or that of rank 0."""
        for one in (rank, 0):
            if name in self.file(one).outline:
                return self.file(one)
        raise DamagedCheckpoint(f"{files_of(rank)[1]} has no tensor {name!r}")

    @functools.cached_property
    def shards(self) -> dict[str, list[tuple[int, Shard]]]:
        """Name of a sharded tensor -> (rank, its shard), for all ranks."""
        found: dict[str, list[tuple[int, Shard]]] = {}
        for rank in range(self.num_ranks):
            try:
                own = {name: Shard.from_json(one) for name, one in _shards(self.tree(rank))}
            except (LookupError, TypeError, ValueError) as error:
                raise DamagedCheckpoint(f"{files_of(rank)[0]} cannot be read: {error!r}") from error
            for name, shard in own.items():
                found.setdefault(name, []).append((rank, shard))
        return found


def _shards(tree: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(tree, dict):
        if "!shard" in tree:
            yield tree["part"]["!tensor"], tree["!shard"]
        for one in tree.values():
            yield from _shards(one)
    elif isinstance(tree, list):
        for one in tree:
            yield from _shards(one)


@dataclass(frozen=True)
class _Piece:
    """A box of a tensor that is stored in one file."""

    file: TensorFile
    name: str
    box: Box
    """The part of the whole tensor that is in this file."""
    common: Box
    """The part of `box` that the reader needs."""


class Sources:
    """The tensors of one rank's state, by name.

    Args:
        files: The files of all ranks.
        rank: The rank whose tensors are read.
    """

    def __init__(self, files: RankFiles, rank: int) -> None:
        self._files = files
        self._entries: dict[str, tuple[TensorFile, str]] = {}
        self._wanted: dict[str, tuple[Box, list[_Piece]]] = {}
        self.include(rank)

    def include(self, rank: int, prefix: str = "") -> None:
        """Add a rank's tensors, with `prefix` prepended to their names."""
        for one in (0, rank):
            file = self._files.file(one)
            self._entries |= {prefix + name: (file, name) for name in file.outline}

    @property
    def outline(self) -> dict[str, torch.Tensor]:
        """The tensors without their data."""
        return {name: file.outline[entry] for name, (file, entry) in self._entries.items()}

    def want(self, name: str, box: Box, shard: Shard | None) -> torch.Tensor:
        """Choose which box of the whole tensor `read` reads.

        Args:
            shard: The shard in this rank's file; None: the whole tensor.
        Returns:
            A tensor of the box's shape, without data.
        Raises:
            DamagedCheckpoint: If the ranks' files do not cover the whole box.
        """
        file, entry = self._entries[name]
        outlined = file.outline[entry]
        own = Box.whole(outlined.shape) if shard is None else shard.box
        common = own.common(box)
        if common == box or not box.numel:
            pieces = [_Piece(file, entry, own, common)] if common is not None else []
        else:
            pieces = list(self._pieces(name, box, shard))
        found = sum(piece.common.numel for piece in pieces)
        if found != box.numel:
            raise DamagedCheckpoint(
                f"{name}: expected {box.numel} elements in the files of all ranks together, found"
                f" {found}"
            )
        self._wanted[name] = box, pieces
        return torch.empty(box.shape, dtype=outlined.dtype, device="meta")

    def _pieces(self, name: str, box: Box, shard: Shard | None) -> Iterator[_Piece]:
        seen: set[Box] = set()  # read only one of several replicas
        for rank, held in self._files.shards.get(name, []):
            common = held.box.common(box)
            if shard is None or held.of != shard.of or (common and common in seen):
                continue
            if common is not None:
                seen.add(common)
                file = self._files.holder(rank, name)
                if tuple(file.outline[name].shape) != held.box.shape:
                    raise DamagedCheckpoint(
                        f"{file.file.name}: the tensor {name} has shape"
                        f" {list(file.outline[name].shape)}, but the state of its rank says"
                        f" {list(held.box.shape)}"
                    )
                yield _Piece(file, name, held.box, common)

    def read(self, tensors: Mapping[str, torch.Tensor], *, is_whole: bool) -> None:
        """Read the data of these names into `tensors`, which must be contiguous.

        Args:
            is_whole: Whether to verify the rest of the open files, too.
        Raises:
            DamagedCheckpoint: If that failed; the content of `tensors` is then undefined.
        """
        parts: dict[int, list[Target]] = {}
        scattered: dict[int, list[tuple[torch.Tensor, torch.Tensor, Box]]] = {}
        for name, memory in tensors.items():
            for piece in self._of(name, memory):
                box, _ = self._wanted.get(name, (piece.box, None))
                begin = piece.common.seen_from(piece.box).begin_in(piece.box.shape)
                target = memory[piece.common.seen_from(box).slices()]
                if begin is None or not target.is_contiguous():
                    whole = torch.empty(piece.box.shape, dtype=memory.dtype, device="cpu")
                    copied = (target, whole, piece.common.seen_from(piece.box))
                    scattered.setdefault(id(piece.file), []).append(copied)
                    begin, target = 0, whole
                at = piece.file.entries[piece.name].begin + begin * memory.element_size()
                parts.setdefault(id(piece.file), []).append(Target(at, flat(target)))
        for file in self._files.tensors.values():
            if is_whole or id(file) in parts:
                file.read_parts(parts.get(id(file), []), is_whole=is_whole)
            for target, whole, box in scattered.pop(id(file), []):
                target.copy_(whole[box.slices()])

    def _of(self, name: str, memory: torch.Tensor) -> list[_Piece]:
        if name in self._wanted:
            return self._wanted[name][1]
        file, entry = self._entries[name]
        whole = Box.whole(memory.shape)
        return [_Piece(file, entry, whole, whole)]

    def differing(self) -> list[str]:
        """Names of unsharded tensors that are in the file of another rank than 0."""
        ranks = range(1, self._files.num_ranks)
        names = dict.fromkeys(name for rank in ranks for name in self._files.file(rank).outline)
        return [name for name in names if name not in self._files.shards]

    def close(self) -> None:
        """Close the files."""
        self._files.close()
