"""Reading a file of a checkpoint into memory, with its checksums verified while reading.

Threads share the chunks: reading, CRC-32 and copying release the GIL. Files are not mapped with
mmap: if a mapped file shrinks, the process is killed.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.format.checksums import CHUNK, crc32, num_chunks
from forge.checkpoint.format.tensorfile import MALFORMED, MAX_HEADER, parse
from forge.checkpoint.host_memory import bytes_of, copy_bytes, num_threads
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
