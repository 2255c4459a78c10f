"""The tensors of one file, read into memory of their own or into that of live tensors.

There are two passes, because nothing live may be overwritten by bytes whose damage shows at the
end of the file only:

    read    everything is read once and compared with its checksums; tensors that nobody uses yet
            get their bytes here, all others go through small buffers that stay in the cache
    fill    what belongs into live tensors is read once more
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from forge.checkpoint.format.checksums import CHUNK
from forge.checkpoint.format.tensorfile import DTYPES, MAX_HEADER
from forge.checkpoint.io.arena import fresh_memory
from forge.checkpoint.load.file_reading import CheckedFile, Piece
from forge.errors import DamagedCheckpoint

_SMALL = 64 << 10
"""Bytes below which a tensor gets memory from the usual allocator."""

_BLOCK = 64 << 20
"""Bytes for which memory is asked at once."""

_ALIGNMENT = 64


_MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,  # RecursionError is one
    MemoryError,
    OverflowError,
)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class TensorFile:
    """The tensors of one file.

    Raises:
        DamagedCheckpoint: Where the layout is not that of the format.
    """

    def __init__(self, file: CheckedFile) -> None:
        self.file = file
        try:
            self._head = self._read_head()
            self.entries, self._complex128 = _parse(self._head, file.size)
            self.outline = {name: self._outlined(entry) for name, entry in self.entries.items()}
            """The tensors without their data."""
        except _MALFORMED as error:
            raise DamagedCheckpoint(
                f"{file.name}: is not in safetensors layout: {error!r}"
            ) from error

    def _read_head(self) -> bytes:
        if self.file.size < 8:
            raise ValueError(f"a file of {self.file.size} bytes")
        length = int.from_bytes(self._first(8), "little")
        if not 0 < length <= min(self.file.size - 8, MAX_HEADER):
            raise ValueError(f"header of {length} bytes in a file of {self.file.size}")
        return self._first(8 + length)

    def _first(self, count: int) -> bytes:
        found = bytearray(count)
        self.file.read([Piece(0, count, memoryview(found))], is_checked=False)
        return bytes(found)

    def _outlined(self, entry: Entry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return self._shown(entry.name, tensor)

    def read(self, elsewhere: Collection[str], *, is_checked: bool) -> dict[str, torch.Tensor]:
        """The tensors but those named in `elsewhere`, each in memory of its own.

        Args:
            is_checked: Whether the whole file is read and compared with its checksums.
        Raises:
            DamagedCheckpoint: Where bytes have changed.
        """
        head = bytearray(len(self._head))
        pieces = [Piece(0, len(head), memoryview(head))]
        found: dict[str, torch.Tensor] = {}
        entries = [entry for name, entry in self.entries.items() if name not in elsewhere]
        memory = _reserve([entry.size for entry in entries])
        for entry, flat in zip(entries, memory, strict=True):
            pieces.append(Piece(entry.begin, entry.end, view_of(flat)))
            tensor = flat.view(entry.dtype).reshape(entry.shape)
            found[entry.name] = self._shown(entry.name, tensor)
        pieces = [piece for piece in pieces if piece.end > piece.begin]
        self.file.read(pieces, is_checked=is_checked)
        if head != self._head:
            raise DamagedCheckpoint(f"{self.file.name}: its header has changed while it was read")
        return found

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put the data of these names into `tensors`, contiguous ones, where they are.

        Raises:
            DamagedCheckpoint: Where that failed; what the tensors hold is then undefined.
        """
        pieces, on_devices = [], []
        for name, entry in self.entries.items():
            tensor = tensors.get(name)
            if tensor is None or not entry.size:
                continue
            if tensor.device.type == "cpu":
                pieces.append(Piece(entry.begin, entry.end, view_of(tensor)))
            else:
                on_devices.append((entry, tensor))
        self.file.read(pieces, is_checked=False)
        self._fill_devices(on_devices)
        if self.file.has_changed():
            raise DamagedCheckpoint(f"{self.file.name}: was written to while it was read")

    def _fill_devices(self, targets: list[tuple[Entry, torch.Tensor]]) -> None:
        """Through one buffer in pinned memory, which a device reads fastest."""
        if not targets:
            return
        size = min(CHUNK, max(entry.size for entry, _ in targets))
        is_pinned = torch.cuda.is_available()
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        for entry, tensor in targets:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            for begin in range(entry.begin, entry.end, size):
                end = min(begin + size, entry.end)
                self.file.read(
                    [Piece(begin, end, view_of(buffer[: end - begin]))], is_checked=False
                )
                flat[begin - entry.begin : end - entry.begin].copy_(buffer[: end - begin])

    def _shown(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(tensor) if name in self._complex128 else tensor


def view_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; the tensor has to outlive it."""
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _reserve(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Bytes of these sizes: small ones each by itself, the others in blocks that neighbours share.

    A block lives as long as the last of its tensors: neighbours mostly belong to one object.
    """
    small = [size if size < _SMALL else 0 for size in sizes]
    found = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in small]
    blocks: list[list[int]] = []
    room = 0
    for number, size in enumerate(sizes):
        if size >= _SMALL:
            if not blocks or size > room:
                blocks.append([])
                room = _BLOCK
            blocks[-1].append(number)
            room -= _aligned(size)
    for block in blocks:
        length = sum(_aligned(sizes[number]) for number in block)
        try:
            memory = fresh_memory(length)
        except MemoryError as error:  # or a header that asks for what nobody has
            raise DamagedCheckpoint(f"there is no memory to read it: {error}") from error
        offset = 0
        for number in block:
            size = sizes[number]
            found[number] = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
            offset += _aligned(size)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _parse(head: bytes, size: int) -> tuple[dict[str, Entry], set[str]]:
    """The entries in the order in which they lie in the file; which of them are complex128."""
    header = json.loads(head[8:])
    complex128 = set(json.loads(header.pop("__metadata__", {}).get("complex128", "[]")))
    entries: list[Entry] = []
    for name, described in header.items():
        begin, end = described["data_offsets"]
        dtype, shape = DTYPES[described["dtype"]], tuple(described["shape"])
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise ValueError(f"{name}: a shape or offset that is not a number")
        if not begin <= end <= size - len(head):
            raise ValueError(f"{name}: offsets {begin}..{end} in {size - len(head)} bytes")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {end - begin} bytes for {dtype} of shape {list(shape)}")
        if name in complex128 and (dtype is not torch.float64 or shape[-1:] != (2,)):
            raise ValueError(f"{name}: complex128 as {dtype} of shape {list(shape)}")
        entries.append(Entry(name, dtype, shape, len(head) + begin, len(head) + end))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = len(head)
    for entry in entries:  # they fill the file: nobody reads for long what says little
        if entry.begin != end:
            raise ValueError(f"{entry.name}: begins at {entry.begin}, not at {end}")
        end = entry.end
    if end != size:
        raise ValueError(f"{end} bytes of tensors in a file of {size}")
    return {entry.name: entry for entry in entries}, complex128
