"""Tensors in one file, in safetensors layout; written and checksummed in one pass.

    8 bytes: length of the header | the header, JSON | the tensors' bytes, without gaps

`safetensors.torch.load_file` reads it. Dtypes that the format lacks (complex128) are kept as
their real parts, noted in the header's metadata. Source: the safetensors format specification.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.checksums import CHUNK, Checksums
from forge.errors import CheckpointError, DamagedCheckpoint

_SMALL = 64 << 10
"""Bytes below which a tensor gets memory of its own when it is read."""

_DTYPES = {
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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


def read_bytes(path: Path, entry: dict[str, Any], is_checked: bool) -> torch.Tensor:
    """A file's bytes as a uint8 tensor of shape [size], checked before they are returned.

    Raises:
        DamagedCheckpoint: Where the file is missing, is no plain file, or size or checksum differ.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: cannot be opened: {error.strerror}") from error
    try:
        buffer, found = _read_all(fd, entry["size"], is_checked)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError, MemoryError) as error:  # torch's word for no memory
        raise DamagedCheckpoint(f"{path.name}: {error}") from error
    finally:
        os.close(fd)
    if is_checked:
        _compare(path.name, entry, found)
    return buffer


def _compare(name: str, entry: dict[str, Any], found: dict[str, Any]) -> None:
    for number, (expected, got) in enumerate(zip(entry["chunks"], found["chunks"], strict=True)):
        if expected != got:
            raise DamagedCheckpoint(
                f"{name}: expected CRC-32 {expected:08x} of the {CHUNK} bytes from"
                f" {number * CHUNK} on, found {got:08x}: bytes have changed"
            )
    if entry["crc32"] != found["crc32"]:
        raise DamagedCheckpoint(
            f"{name}: expected CRC-32 {entry['crc32']:08x}, found {found['crc32']:08x}"
        )


def _read_all(fd: int, size: int, is_checked: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a plain file")
    if status.st_size != size:  # before any memory is asked for
        raise ValueError(f"expected {size} bytes, found {status.st_size}")
    checksums = Checksums()
    buffer = torch.empty(size, dtype=torch.uint8)
    if size == 0:
        return buffer, checksums.entry()
    view = memoryview((ctypes.c_char * size).from_address(buffer.data_ptr())).cast("B")
    position = 0
    while position < size:
        count = os.readv(fd, [view[position : position + CHUNK]])
        if not count:
            raise ValueError(f"ends after {position} of {size} bytes")
        if is_checked:
            checksums.update(view[position : position + count])
        position += count
    return buffer, checksums.entry()


def to_bytes(buffer: torch.Tensor) -> bytes:
    """The content of a uint8 tensor of shape [size]."""
    return ctypes.string_at(buffer.data_ptr(), len(buffer)) if len(buffer) else b""


def parse(buffer: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """The tensors in a file's bytes, as views of `buffer`.

    Raises:
        DamagedCheckpoint: Where the layout is not that of the format.
    """
    try:
        return _parse(buffer)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise DamagedCheckpoint(f"{name}: is not in safetensors layout: {error!r}") from error


def _parse(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    if len(buffer) < 8:
        raise ValueError(f"a file of {len(buffer)} bytes")
    length = int.from_bytes(ctypes.string_at(buffer.data_ptr(), 8), "little")
    if not 0 < length <= len(buffer) - 8:
        raise ValueError(f"header of {length} bytes in a file of {len(buffer)}")
    header = json.loads(ctypes.string_at(buffer.data_ptr() + 8, length))
    complex128 = set(json.loads(header.pop("__metadata__", {}).get("complex128", "[]")))
    data = buffer[8 + length :]
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"{name}: offsets {begin}..{end} in {len(data)} bytes")
        tensor = data[begin:end].view(dtype).reshape(shape)
        if dtype is torch.uint8 or end - begin < _SMALL:
            tensor = tensor.clone()  # generators read their state as words: it has to be aligned
        tensors[name] = torch.view_as_complex(tensor) if name in complex128 else tensor
    return tensors
