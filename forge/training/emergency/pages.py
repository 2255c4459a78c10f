"""What each rank has by itself, in a file that outlives it: one page for each of two boundaries.

The kernel keeps what a process wrote before it was killed, so that another rank can read it. What
a power cut leaves is of no use, and nothing is synced. Two pages in turn: a rank that is one
boundary ahead has not overwritten the one that counts.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from forge import messages
from forge.filesystem.files import open_file, open_trusted

_NAME = "boundary"
"""`<job dir>/.forge/boundary.<rank>`."""

_HEADER = struct.Struct("<QQI")
"""Which boundary, how many bytes follow, and their CRC-32."""

_PAGE = 1 << 20
"""Bytes of a page; what is larger is not kept."""


class Pages:
    """Those of the ranks of one attempt, until `close`; this process writes its own.

    Args:
        folder: The job's `.forge`.
        rank: This process's number.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._own = self._path(rank)
        self._fd: int | None = None
        with self._giving_up():
            self._fd = open_file(self._own, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    @staticmethod
    def clear(folder: Path) -> None:
        """Remove those of the attempt before, before any rank makes its own.

        Raises:
            OSError: Where one cannot be removed.
        """
        for one in folder.glob(f"{_NAME}.*"):
            one.unlink()

    def _path(self, rank: int) -> Path:
        return self._folder / f"{_NAME}.{rank}"

    @contextlib.contextmanager
    def _giving_up(self) -> Any:
        """Where the disk takes nothing, training goes on without."""
        try:
            yield
        except OSError as error:
            messages.warn(
                f"{self._own} cannot be written ({error}): where a rank dies, the job resumes from"
                " its last checkpoint, and not from its last boundary."
            )
            self.close()

    def write(self, boundary: int, value: Any) -> None:
        """Keep a value of plain containers, numbers, strings and tensors in memory of the host."""
        if self._fd is None:
            return
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        pickler.dispatch_table = {torch.Tensor: _reduced}
        pickler.dump(value)
        content = buffer.getvalue()
        header = _HEADER.pack(boundary, len(content), zlib.crc32(content))
        if len(header) + len(content) <= _PAGE:
            with self._giving_up():
                os.pwrite(self._fd, header + content, boundary % 2 * _PAGE)

    def read(self, rank: int, boundary: int) -> Any:
        """What a rank has kept of a boundary; None where it has not come so far.

        Raises:
            OSError: Where its file cannot be read.
            Untrusted: Where somebody else could have written it.
        """
        with os.fdopen(open_trusted(self._path(rank)), "rb") as file:
            file.seek(boundary % 2 * _PAGE)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            found, size, crc = _HEADER.unpack(header)
            content = file.read(size) if found == boundary and size <= _PAGE else b""
        return pickle.loads(content) if content and zlib.crc32(content) == crc else None

    def close(self) -> None:
        """Nothing more is written; what there is stays until the next attempt."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Ten times as fast as torch's own."""
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return _made, (raw.numpy().tobytes(), tensor.dtype, tuple(tensor.shape))


def _made(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
