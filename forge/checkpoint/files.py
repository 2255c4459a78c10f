"""The files of a checkpoint, verified while they are read: each in chunks, and those of all ranks.

Threads share the chunks of a file: reading, CRC-32 and copying release the GIL. Files are not
mapped with mmap: if a mapped file shrinks, the process is killed.

A rank's file has the tensors that differ from rank 0's; all others are read from rank 0's file,
under the same name. If the sharding has changed, a shard is assembled from all saved shards that
it overlaps. Only the needed files are opened, and every opened file is verified.
One module, since a file is read once, for all tensors that any rank's state needs from it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge.checkpoint.format.encoding import MAX_STATE_BYTES
from forge.checkpoint.format.manifest import CHUNK, Manifest, crc32, files_of, num_chunks
from forge.checkpoint.format.shards import Box, Shard
from forge.checkpoint.format.tensor_encoding import bytes_of, copy_bytes, flat, num_threads
from forge.checkpoint.format.tensorfile import MALFORMED, MAX_HEADER, Entry, parse
from forge.errors import DamagedCheckpoint
from forge.filesystem.files import open_file
from forge.process import sections
from forge.process.progress import Phase

_READ = 1 << 20
"""Bytes per read: few enough to be in the CPU's cache still for the checksum and the copy."""

_DIRECT = 64 << 10
"""From this many bytes on, a tensor is read directly; smaller ones are copied from a buffer."""

_LINE = 64
"""Bytes of a cache line."""

_AHEAD = 2
"""Chunks of read-ahead for each thread."""


@dataclass(frozen=True)
class Target:
    """Memory for the bytes of a file from `begin` on: uint8, shape [bytes], on any device."""

    begin: int
    memory: torch.Tensor

    @property
    def end(self) -> int:
        """The offset in the file after the last byte."""
        return self.begin + len(self.memory)


class CheckedFile:
    """An open regular file of the size that the manifest names.

    Args:
        entry: The file's entry in the manifest.
        is_checked: Whether to verify its checksums.
    Raises:
        DamagedCheckpoint: If it is missing, is not a regular file or has another size.
    """

    def __init__(self, path: Path, entry: dict[str, Any], *, is_checked: bool = True) -> None:
        self.name = path.name
        self._is_checked = is_checked
        self.is_verified = False
        """Whether the whole file was verified."""
        self.size: int = entry["size"]
        self._checksums: list[int] = entry["chunks"]
        try:
            self._fd = open_file(path)
        except OSError as error:
            raise self._damage(f"cannot be opened: {error.strerror}") from error
        self.close = weakref.finalize(self, _close, self._fd)
        """Closes the file, once; garbage collection does the same."""
        size = os.fstat(self._fd).st_size
        if size != self.size:  # before any memory is allocated
            raise self._damage(f"expected {self.size} bytes, found {size}")

    def read(self, targets: Iterable[Target] = ()) -> None:
        """Read into targets that do not overlap; the first call verifies the whole file.

        Raises:
            DamagedCheckpoint: If bytes are missing or have changed; the targets are then undefined.
        """
        filled = [target for target in targets if len(target.memory)]
        filled.sort(key=lambda target: target.begin)
        wanted = {n for one in filled for n in range(one.begin // CHUNK, num_chunks(one.end))}
        if self._is_checked and not self.is_verified:
            wanted = set(range(len(self._checksums)))
        # The threads copy on other CUDA streams: wait for the caller's work on these tensors.
        for device in {one.memory.device for one in filled if one.memory.is_cuda}:
            torch.cuda.synchronize(device)
        chunks = _Chunks(self._fd, self.size, filled)
        with ThreadPoolExecutor(num_threads(), "forge-read") as pool:
            try:
                for number, checksum in pool.map(chunks.read, sorted(wanted)):
                    self._check(number, checksum)
            except OSError as error:
                raise self._damage(f"cannot be read: {error.strerror}") from error
            except EOFError as error:
                raise self._damage(f"ends after {error} of {self.size} bytes") from error
            finally:
                pool.shutdown(cancel_futures=True)  # after the first damaged chunk, read no more
        self.is_verified = True

    def _check(self, number: int, found: int) -> None:
        if self._checksums[number] == found or not self._is_checked:
            return
        raise self._damage(
            f"expected CRC-32 {self._checksums[number]:08x} for the {CHUNK} bytes at offset"
            f" {number * CHUNK}, found {found:08x}: the content has changed since it was saved"
        )

    def content(self) -> bytes:
        """The whole file, for small ones."""
        found = bytearray(self.size)
        if found:
            self.read([Target(0, torch.frombuffer(found, dtype=torch.uint8))])
        return bytes(found)

    def _head(self, count: int) -> bytes:
        """The first bytes, without verifying them."""
        found = b""
        while len(found) < count:
            piece = os.pread(self._fd, count - len(found), len(found))
            if not piece:
                raise self._damage(f"ends after {len(found)} of {self.size} bytes")
            found += piece
        return found

    def _damage(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.name}: {what}")


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # everything was read
        os.close(fd)


class TensorsFile(CheckedFile):
    """A file in safetensors layout.

    Raises:
        DamagedCheckpoint: If it has another layout; or like a CheckedFile.
    """

    def __init__(self, path: Path, entry: dict[str, Any], *, is_checked: bool = True) -> None:
        super().__init__(path, entry, is_checked=is_checked)
        try:
            self._header = self._read_header()
            self.entries = parse(self._header, self.size)
            """Its tensors, by name."""
        except MALFORMED as error:
            super().read()  # if the file is damaged, that is the cause of the error
            raise DamagedCheckpoint(
                f"{self.name} is not a valid safetensors file: {error!r}"
            ) from error

    def _read_header(self) -> bytes:
        if self.size < 8:
            raise ValueError(f"it has only {self.size} bytes")
        length = int.from_bytes(self._head(8), "little")
        limit = min(self.size - 8, MAX_HEADER)
        if not 0 < length <= limit:
            raise ValueError(f"expected a header of at most {limit} bytes, found {length}")
        return self._head(8 + length)

    def read(self, targets: Iterable[Target] = ()) -> None:
        """Like that of a CheckedFile; verifies also the header, which was read without a check."""
        header = bytearray(self._header)
        super().read([Target(0, torch.frombuffer(header, dtype=torch.uint8)), *targets])
        if header != self._header:
            raise self._damage("its header changed while it was read")


class _Chunks:
    """Reads chunks of a file into the targets that overlap them; thread-safe."""

    def __init__(self, fd: int, size: int, targets: list[Target]) -> None:
        self._fd = fd
        self._size = size
        self._targets = targets
        self._ends = [target.end for target in targets]
        self._spare: list[bytearray] = []

    def read(self, number: int) -> tuple[int, int]:
        """Read one chunk; returns its number and its CRC-32."""
        at, end = number * CHUNK, min((number + 1) * CHUNK, self._size)
        if hasattr(os, "posix_fadvise"):
            ahead = at + _AHEAD * num_threads() * CHUNK
            os.posix_fadvise(self._fd, ahead, CHUNK, os.POSIX_FADV_WILLNEED)
        # Each thread takes a buffer and returns it, so that threads do not share one.
        buffer = self._spare.pop() if self._spare else bytearray(_READ)
        checksum = 0
        while at < end:
            room = self._straight(at, min(end, at + _READ))
            memory = memoryview(buffer)[: end - at] if room is None else room
            count = os.preadv(self._fd, [memory], at)
            if not count:
                raise EOFError(at)
            sections.current().advance(Phase.start_up)
            checksum = crc32(memory[:count], checksum)
            if room is None:
                self._hand_out(at, torch.frombuffer(buffer, dtype=torch.uint8, count=count))
            at += count
        self._spare.append(buffer)
        return number, checksum

    def _straight(self, begin: int, end: int) -> memoryview | None:
        """Memory to read the bytes from `begin` into directly, if a CPU target takes enough."""
        index = bisect.bisect_right(self._ends, begin)
        if index == len(self._targets):
            return None
        target = self._targets[index]
        count = min(end, target.end) - begin
        if begin < target.begin or count < _DIRECT or target.memory.device.type != "cpu":
            return None
        # First up to the next cache line: the kernel copies 2-3 times as fast to aligned memory.
        shift = (target.memory.data_ptr() + begin - target.begin) % _LINE
        return bytes_of(target.memory, begin - target.begin, _LINE - shift if shift else count)

    def _hand_out(self, begin: int, piece: torch.Tensor) -> None:
        end = begin + len(piece)
        for index in range(bisect.bisect_right(self._ends, begin), len(self._targets)):
            target = self._targets[index]
            if target.begin >= end:
                return
            low, high = max(begin, target.begin), min(end, target.end)
            memory = target.memory[low - target.begin : high - target.begin]
            copy_bytes(memory, piece[low - begin : high - begin])


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
            entry = self._described.files[name]
            if entry["size"] > MAX_STATE_BYTES:
                raise DamagedCheckpoint(
                    f"{name}: expected at most {MAX_STATE_BYTES} bytes of JSON, found"
                    f" {entry['size']}"
                )
            file = CheckedFile(self._path / name, entry, is_checked=self._is_checked)
            with contextlib.closing(file):
                content = file.content()
            try:
                self._trees[rank] = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise DamagedCheckpoint(f"{name} cannot be read: {error}") from error
        return self._trees[rank]

    def tensors(self, rank: int) -> TensorsFile:
        """A rank's tensors' file."""
        if rank not in self._tensors:
            _, name = files_of(rank)
            entry = self._described.files[name]
            file = TensorsFile(self._path / name, entry, is_checked=self._is_checked)
            self._tensors[rank] = file
        return self._tensors[rank]

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
        """Read tensors; the first call verifies all open files, even without destinations.

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
