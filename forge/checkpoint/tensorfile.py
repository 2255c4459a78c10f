"""Tensors in one file, in safetensors layout; written and checksummed in one pass.

    8 bytes: length of the header | the header, JSON | the tensors' bytes, without gaps

`safetensors.torch.load_file` reads it. Dtypes that the format lacks (complex128) are kept as
their real parts, noted in the header's metadata. Source: the safetensors format specification.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.checksums import CHUNK, Checksums
from forge.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def storable(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """The tensor on the CPU, contiguous; `copy` makes it independent of the original."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.to("cpu", copy=copy).contiguous()


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError where the format has no such dtype."""
    if tensor.dtype not in _NAMES and tensor.dtype is not torch.complex128:
        raise CheckpointError(f"{name}: tensors of {tensor.dtype} cannot be saved")


def write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write `tensors` to a new file, synced to disk; return what the manifest says of it."""
    # Widest first: every tensor then begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    complex128: list[str] = []
    offset = 0
    for name in names:
        tensor = tensors[name]
        shape = list(tensor.shape)
        if tensor.dtype is torch.complex128:
            complex128.append(name)
            dtype_name, shape = "F64", [*shape, 2]
        else:
            check_dtype(name, tensor)
            dtype_name = _NAMES[tensor.dtype]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header["__metadata__"] = {"format": "pt", "complex128": json.dumps(complex128)}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)  # complex128 needs 16, other libraries like 64
    head = len(text).to_bytes(8, "little") + text
    return write_synced(path, _pieces(head, [tensors[name] for name in names]))


def _pieces(head: bytes, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        plain = storable(tensor)
        size = plain.numel() * plain.dtype.itemsize
        if size:
            view = memoryview((ctypes.c_char * size).from_address(plain.data_ptr())).cast("B")
            for start in range(0, size, CHUNK):
                yield view[start : start + CHUNK]


def write_synced(path: Path, pieces: Iterator[memoryview]) -> dict[str, Any]:
    """Write pieces to a new file and sync it; return what the manifest says of it."""
    checksums = Checksums()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for piece in pieces:
            checksums.update(piece)
            while piece:
                piece = piece[os.write(fd, piece) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return checksums.entry()
