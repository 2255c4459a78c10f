"""One file of a checkpoint, read: checked as it is read, and straight to where its bytes belong.

Threads share the chunks: reading and CRC-32 release the interpreter's lock. Nothing is mapped: a
mapped file that shrinks kills the process.
"""

from __future__ import annotations

import bisect
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forge.checkpoint.format.checksums import CHUNK, crc32
from forge.errors import DamagedCheckpoint

_STEP = 1 << 20
"""Bytes read at once where they are checked: they are still in the cache for the checksum."""

_AHEAD = 2
"""Chunks that the system is asked to read before they are needed, for each thread."""

_MAX_VIEWS = 512
"""Places that one read goes to; systems allow 1024."""


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of a file, and where they go."""

    begin: int
    end: int
    memory: memoryview


class CheckedFile:
    """A plain file, open, of the size that the manifest says.

    Raises:
        DamagedCheckpoint: Where it is missing, is no plain file or has another size.
    """

    def __init__(self, path: Path, entry: dict[str, Any]) -> None:
        self.name = path.name
        self.size: int = entry["size"]
        self._entry = entry
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags)
        except OSError as error:
            raise self._damage(f"cannot be opened: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        self._looked = _look(status)
        problem = None
        if not stat.S_ISREG(status.st_mode):
            problem = "is not a plain file"
        elif status.st_size != self.size:  # before any memory is asked for
            problem = f"expected {self.size} bytes, found {status.st_size}"
        if problem:
            self.close()
            raise self._damage(problem)

    def close(self) -> None:
        """Close the file, if it is open."""
        self._finalizer()

    def read(self, pieces: Sequence[Piece], *, is_checked: bool) -> None:
        """Read `pieces`, which are in order and do not overlap.

        Args:
            is_checked: Whether the whole file is read for that, and its checksums compared.
        Raises:
            DamagedCheckpoint: Where bytes are missing or have changed; what was read is undefined.
        """
        ranges = _chunks([(0, self.size)] if is_checked else [(p.begin, p.end) for p in pieces])
        reader = _Reader(self._fd, pieces, _STEP if is_checked else CHUNK)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            _in_threads(partial(self._check, reader) if is_checked else reader.read, ranges)
        except OSError as error:
            raise self._damage(f"cannot be read: {error.strerror}") from error
        except EOFError as error:
            raise self._damage(f"ends after {error} of {self.size} bytes") from error

    def content(self, *, is_checked: bool) -> bytes:
        """The whole file, for small ones."""
        found = bytearray(self.size)
        if found:
            self.read([Piece(0, self.size, memoryview(found))], is_checked=is_checked)
        return bytes(found)

    def has_changed(self) -> bool:
        """Whether somebody has written to the file since it was opened."""
        return _look(os.fstat(self._fd)) != self._looked

    def _check(self, reader: _Reader, begin: int, end: int) -> None:
        """Read one chunk; the others need not be, if this one has changed."""
        number = begin // CHUNK
        expected, found = self._entry["chunks"][number], reader.checksum(begin, end)
        if expected != found:
            raise self._damage(
                f"expected CRC-32 {expected:08x} of the {CHUNK} bytes from {begin} on,"
                f" found {found:08x}: bytes have changed"
            )

    def _damage(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.name}: {what}")


def _look(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


class _Reader:
    """Reads ranges of a file into the pieces that lie there, in any thread."""

    def __init__(self, fd: int, pieces: Sequence[Piece], step: int) -> None:
        self._fd = fd
        self._pieces = pieces
        self._ends = [piece.end for piece in pieces]
        self._step = step
        self._spare: list[memoryview] = []

    def checksum(self, begin: int, end: int) -> int:
        """Read all bytes from `begin` to `end`; returns their CRC-32."""
        if hasattr(os, "posix_fadvise"):
            ahead = begin + _AHEAD * num_threads() * CHUNK
            os.posix_fadvise(self._fd, ahead, CHUNK, os.POSIX_FADV_WILLNEED)
        checksum = 0
        # What belongs nowhere goes here; taken and given back, so that threads do not share it.
        scratch = self._spare.pop() if self._spare else memoryview(bytearray(self._step))
        for count, views in self._read(begin, end, scratch):
            for view in views:
                checksum = crc32(view[: max(count, 0)], checksum)
                count -= len(view)
        self._spare.append(scratch)
        return checksum

    def read(self, begin: int, end: int) -> None:
        """Read the bytes from `begin` to `end`, all of which lie in pieces."""
        for _ in self._read(begin, end, memoryview(b"")):
            pass

    def _read(
        self, begin: int, end: int, scratch: memoryview
    ) -> Iterator[tuple[int, list[memoryview]]]:
        while begin < end:
            views = self._views(begin, min(end, begin + self._step), scratch)
            count = os.preadv(self._fd, views, begin)
            if not count:
                raise EOFError(begin)
            yield count, views
            begin += count

    def _views(self, begin: int, end: int, scratch: memoryview) -> list[memoryview]:
        views: list[memoryview] = []
        first = begin
        number = bisect.bisect_right(self._ends, begin)
        while begin < end and len(views) < _MAX_VIEWS:
            piece = self._pieces[number] if number < len(self._pieces) else None
            if piece is not None and piece.begin <= begin:
                stop = min(end, piece.end)
                views.append(piece.memory[begin - piece.begin : stop - piece.begin])
                number += 1
            else:
                stop = end if piece is None else min(end, piece.begin)
                views.append(scratch[begin - first : stop - first])
            begin = stop
        return views


def num_threads() -> int:
    """Threads that read or copy: one for each of our cores, but no more than a disk can feed."""
    if hasattr(os, "sched_getaffinity"):
        return min(4, len(os.sched_getaffinity(0)))
    return min(4, os.cpu_count() or 1)


def _chunks(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in ranges of a chunk at most, what follows on each other put together."""
    joined: list[list[int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1][1] = end
        else:
            joined.append([begin, end])
    return [(at, min(at + CHUNK, end)) for begin, end in joined for at in range(begin, end, CHUNK)]


def _in_threads(do: Callable[[int, int], None], ranges: Sequence[tuple[int, int]]) -> None:
    if len(ranges) < 2:
        for begin, end in ranges:
            do(begin, end)
        return
    with ThreadPoolExecutor(num_threads(), "forge-read") as pool:
        try:
            for _ in pool.map(do, *zip(*ranges, strict=True)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
