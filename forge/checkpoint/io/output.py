"""A file that two threads write and checksum, past the page cache where the file system lets them.

O_DIRECT spares a copy of every byte and does not push out of memory what training reads. It asks
for whole pages: the last, broken one is written without it. tmpfs and some network disks refuse it,
some only when it is used.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forge.checkpoint.format.checksums import CHUNK, crc32, num_chunks
from forge.checkpoint.io.arena import PAGE
from forge.filesystem import durable
from forge.process import sections
from forge.process.progress import Section

NUM_THREADS = 2
"""Checksums of one chunk are made while another is written."""

Reader = Callable[[int], memoryview]
"""Number of a chunk -> its bytes, at the start of a page; good until the same thread asks again."""


def write_file(path: Path, size: int, readers: list[Reader]) -> dict[str, Any]:
    """Write a new file of `size` bytes, one thread for each reader, and sync it.

    Returns:
        What the manifest says of the file.
    Raises:
        OSError: From the disk.
    """
    with durable.new_file(path) as fd:
        output = _Output(fd, size)
        output.write(readers)
    return {"size": size, "chunks": output.checksums}


class _Output:
    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._is_direct = False
        self._set_direct(is_direct=size >= PAGE)
        self._tail = size % PAGE if self._is_direct else 0
        self.checksums = [0] * num_chunks(size)
        self._numbers: Iterator[int] = iter(range(len(self.checksums)))
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def write(self, readers: list[Reader]) -> None:
        """All chunks, then what is left of the last one."""
        helpers = [
            threading.Thread(target=self._work, args=(reader,), name="forge-write", daemon=True)
            for reader in readers[1 : len(self.checksums)]
        ]
        for helper in helpers:
            helper.start()
        self._work(readers[0])
        for helper in helpers:
            helper.join()
        if self._failures:
            raise self._failures[0]
        if self._tail:
            self._set_direct(is_direct=False)
            number, left = divmod(self._size, CHUNK)
            self._put(readers[0](number)[left - self._tail : left], self._size - self._tail)

    def _work(self, reader: Reader) -> None:
        try:
            while not self._failures:
                with self._lock:
                    number = next(self._numbers, None)
                if number is None:
                    return
                begin = number * CHUNK
                piece = reader(number)[: self._size - begin]
                self.checksums[number] = crc32(piece)
                self._put(piece[: self._size - self._tail - begin], begin)
        except BaseException as error:  # noqa: BLE001 - raised again by `write`
            self._failures.append(error)

    def _put(self, piece: memoryview, position: int) -> None:
        while piece:
            was_direct = self._is_direct  # the other thread may find out meanwhile
            try:
                count = os.pwrite(self._fd, piece, position)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._set_direct(is_direct=False)  # refused where it is used
                continue
            if was_direct and count % PAGE:
                count -= count % PAGE  # a disk about to be full: the next call says so
                if not count:
                    self._set_direct(is_direct=False)
            piece, position = piece[count:], position + count
            sections.current().advance(Section.save)

    def _set_direct(self, *, is_direct: bool) -> None:
        if not hasattr(os, "O_DIRECT"):  # macOS
            return
        import fcntl

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        except OSError:
            if not is_direct:
                raise
            return  # refused by the file system: through the page cache, then
        self._is_direct = is_direct
