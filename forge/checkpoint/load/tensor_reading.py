"""The tensors of one file, read into memory of their own or into that of live tensors.

There are two passes, because nothing live may be overwritten by bytes whose damage shows at the
end of the file only: the first reads and checks everything, and fills the tensors that nobody uses
yet; the second fills the live ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from forge.checkpoint.format.tensorfile import DTYPES, MAX_HEADER
from forge.checkpoint.io.copying import flat
from forge.checkpoint.load.file_reading import CheckedFile, Target
from forge.errors import DamagedCheckpoint

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
        length = int.from_bytes(self.file.head(8), "little")
        if not 0 < length <= min(self.file.size - 8, MAX_HEADER):
            raise ValueError(f"header of {length} bytes in a file of {self.file.size}")
        return self.file.head(8 + length)

    def _outlined(self, entry: Entry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return torch.view_as_complex(tensor) if entry.name in self._complex128 else tensor

    def read(self, tensors: Mapping[str, torch.Tensor], *, is_whole: bool) -> None:
        """Put the data of these names into `tensors`, contiguous ones, where they are.

        Args:
            is_whole: Whether to check all other bytes of the file, too.
        Raises:
            DamagedCheckpoint: Where that failed; what the tensors hold is then undefined.
        """
        head = bytearray(self._head)
        targets = [Target(0, torch.frombuffer(head, dtype=torch.uint8))]
        for name, entry in self.entries.items():
            if name in tensors:
                targets.append(Target(entry.begin, flat(tensors[name])))
        self.file.read(targets, is_whole=is_whole)
        if head != self._head:
            raise DamagedCheckpoint(f"{self.file.name}: its header has changed while it was read")


class TensorFiles:
    """The tensors of several files; of a name that two have it is the first file's."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._files = files
        self._owner = {name: one for one in reversed(files) for name in one.outline}
        self.outline = {name: one.outline[name] for name, one in self._owner.items()}
        """The tensors without their data."""

    def read(self, tensors: Mapping[str, torch.Tensor], *, is_whole: bool) -> None:
        """See `TensorFile.read`."""
        for file in self._files:
            own = {name: t for name, t in tensors.items() if self._owner[name] is file}
            if own or is_whole:
                file.read(own, is_whole=is_whole)

    def close(self) -> None:
        """Close the files."""
        for one in self._files:
            one.file.close()


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
