"""One file of a checkpoint, read: checked as it is read, and put where its bytes belong.

Threads share the chunks: reading, CRC-32 and copying release the interpreter's lock. Nothing is
mapped: a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.format.checksums import CHUNK, crc32, num_chunks
from forge.checkpoint.io.copying import bytes_of, copy_bytes, num_threads
from forge.errors import DamagedCheckpoint
from forge.filesystem.files import open_file
from forge.process import sections
from forge.process.progress import Section

_STEP = 1 << 20
"""Bytes read at once: they are still in the cache for the checksum and the copy."""

_DIRECT = 64 << 10
"""Bytes of one tensor that are read straight into it; fewer go through a buffer, with others."""

_LINE = 64
"""Bytes of a cache line."""

_AHEAD = 2
"""Chunks that the system is asked to read before they are needed, for each thread."""


@dataclass(frozen=True)
class Target:
    """Where the bytes from `begin` of a file go: uint8, shape [bytes], on any device."""

    begin: int
    memory: torch.Tensor

    @property
    def end(self) -> int:
        """Where they end in the file."""
        return self.begin + len(self.memory)


class CheckedFile:
    """A plain file, open, of the size that the manifest says.

    Args:
        entry: What the manifest says of it.
        is_checked: Whether bytes are compared with its checksums.
    Raises:
        DamagedCheckpoint: Where it is missing, is no plain file or has another size.
    """

    def __init__(self, path: Path, entry: dict[str, Any], *, is_checked: bool = True) -> None:
        self.name = path.name
        self._is_checked = is_checked
        self.size: int = entry["size"]
        self._checksums: list[int] = entry["chunks"]
        try:
            self._fd = open_file(path)
        except OSError as error:
            raise self._damage(f"cannot be opened: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._fd)
        """Closes it, once; forgetting it does the same."""
        size = os.fstat(self._fd).st_size
        if size != self.size:  # before any memory is asked for
            raise self._damage(f"expected {self.size} bytes, found {size}")

    def read(self, targets: Sequence[Target], *, is_whole: bool) -> None:
        """Read to `targets`, which are in order and do not overlap.

        Args:
            is_whole: Whether to check what belongs to none of them, too.
        Raises:
            DamagedCheckpoint: Where bytes are missing or have changed; what was read is undefined.
        """
        filled = [target for target in targets if len(target.memory)]
        wanted = {n for one in filled for n in range(one.begin // CHUNK, num_chunks(one.end))}
        if is_whole and self._is_checked:
            wanted = set(range(len(self._checksums)))
        # Threads copy on streams of their own: what the caller's has to do to a tensor comes first.
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
                pool.shutdown(cancel_futures=True)  # once one has changed no other need be read

    def _check(self, number: int, found: int) -> None:
        if self._checksums[number] == found or not self._is_checked:
            return
        raise self._damage(
            f"expected CRC-32 {self._checksums[number]:08x} of the {CHUNK} bytes from"
            f" {number * CHUNK} on, found {found:08x}: bytes have changed"
        )

    def head(self, count: int) -> bytes:
        """The first bytes, not checked."""
        found = b""
        while len(found) < count:
            piece = os.pread(self._fd, count - len(found), len(found))
            if not piece:
                raise self._damage(f"ends after {len(found)} of {self.size} bytes")
            found += piece
        return found

    def content(self) -> bytes:
        """The whole file, for small ones."""
        found = bytearray(self.size)
        if found:
            self.read([Target(0, torch.frombuffer(found, dtype=torch.uint8))], is_whole=True)
        return bytes(found)

    def _damage(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.name}: {what}")


class _Chunks:
    """Reads chunks of a file to the targets that lie in them, in any thread."""

    def __init__(self, fd: int, size: int, targets: Sequence[Target]) -> None:
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
        # Taken and given back, so that threads do not share one.
        buffer = self._spare.pop() if self._spare else bytearray(_STEP)
        checksum = 0
        while at < end:
            room = self._straight(at, min(end, at + _STEP))
            memory = memoryview(buffer)[: end - at] if room is None else room
            count = os.preadv(self._fd, [memory], at)
            if not count:
                raise EOFError(at)
            sections.current().advance(Section.start_up)
            checksum = crc32(memory[:count], checksum)
            if room is None:
                self._hand_out(at, torch.frombuffer(buffer, dtype=torch.uint8, count=count))
            at += count
        self._spare.append(buffer)
        return number, checksum

    def _straight(self, begin: int, end: int) -> memoryview | None:
        """The memory of the bytes from `begin` on, if one target on the CPU takes a good many."""
        index = bisect.bisect_right(self._ends, begin)
        if index == len(self._targets):
            return None
        target = self._targets[index]
        count = min(end, target.end) - begin
        if begin < target.begin or count < _DIRECT or target.memory.device.type != "cpu":
            return None
        # Up to the next cache line first: the kernel copies to one two to three times as fast.
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
