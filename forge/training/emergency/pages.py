"""What each rank has by itself, in a file that outlives it: one page for each of two boundaries.

The kernel keeps what a process wrote before it was killed, so that another rank can read it. What
a power cut leaves is of no use, and nothing is synced. Two pages in turn: a rank that is one
boundary ahead has not overwritten the one that counts.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from forge.filesystem.files import open_file, open_trusted

_NAME = "boundary"
"""`<job dir>/.forge/boundary.<rank>`."""

_HEADER = struct.Struct("<QQI")
"""Which boundary, how many bytes follow, and their CRC-32."""

_PAGE = 64 << 10
"""Bytes of a page: more would take too long at each step."""


class Pages:
    """Those of the ranks of one attempt, until `close`; this process writes its own.

    Args:
        folder: The job's `.forge`.
        rank: This process's number.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._own = self._path(rank)
        self._fd: int | None = open_file(self._own, os.O_RDWR | os.O_CREAT | os.O_EXCL)

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

    def write(self, boundary: int, value: Any) -> str:
        """Keep a value of plain containers, numbers, strings and tensors; says why it cannot.

        Raises:
            OSError: From the disk.
        """
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=5)
        pickler.dispatch_table = {torch.Tensor: _reduced}
        pickler.dump(value)
        content = buffer.getvalue()
        header = _HEADER.pack(boundary, len(content), zlib.crc32(content))
        if len(header) + len(content) > _PAGE:
            return (
                f"what a rank has by itself is more than {_PAGE >> 10} KiB (run.state, the place of"
                " a loader, the random states of many loops)"
            )
        assert self._fd is not None
        os.pwrite(self._fd, header + content, boundary % 2 * _PAGE)
        return ""

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
    plain = tensor.cpu().contiguous()
    raw = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    return _made, (raw, tensor.dtype, tuple(tensor.shape))


def _made(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
