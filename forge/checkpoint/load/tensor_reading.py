"""Reading the tensors of one file, into new or live tensors.

The file is read twice, so that a live tensor is never overwritten before the whole file is
verified: the first pass verifies everything and fills new tensors, the second fills live ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge.checkpoint.format.tensorfile import DTYPES, MAX_HEADER
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
    """A tensor's dtype, shape and position in its file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """The tensors of one file.

    Raises:
        DamagedCheckpoint: If the file is not in safetensors layout.
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
                f"{file.name} is not a valid safetensors file: {error!r}"
            ) from error

    def _read_head(self) -> bytes:
        if self.file.size < 8:
            raise ValueError(f"it has only {self.file.size} bytes")
        length = int.from_bytes(self.file.head(8), "little")
        limit = min(self.file.size - 8, MAX_HEADER)
        if not 0 < length <= limit:
            raise ValueError(f"expected a header of at most {limit} bytes, found {length}")
        return self.file.head(8 + length)

    def _outlined(self, entry: Entry) -> torch.Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return torch.view_as_complex(tensor) if entry.name in self._complex128 else tensor

    def read_parts(self, parts: Sequence[Target], *, is_whole: bool) -> None:
        """Read ranges of the file; several can be of the same tensor.

        Args:
            is_whole: Whether to verify the rest of the file, too.
        Raises:
            DamagedCheckpoint: If that failed; the content of their memory is then undefined.
        """
        head = bytearray(self._head)
        passes = [[Target(0, torch.frombuffer(head, dtype=torch.uint8))]]
        # The same bytes can be needed in two tensors: a pass for each.
        for target in sorted(parts, key=lambda one: (one.begin, one.end)):
            free = next((one for one in passes if one[-1].end <= target.begin), None)
            if free is None:
                passes.append([target])
            else:
                free.append(target)
        for number, targets in enumerate(passes):
            self.file.read(targets, is_whole=is_whole and not number)
        if head != self._head:
            raise DamagedCheckpoint(f"{self.file.name}: its header changed while it was read")


def _parse(head: bytes, size: int) -> tuple[dict[str, Entry], set[str]]:
    """The entries, in the order of the file; and the names of those that are complex128."""
    header = json.loads(head[8:])
    complex128 = set(json.loads(header.pop("__metadata__", {}).get("complex128", "[]")))
    entries: list[Entry] = []
    for name, described in header.items():
        begin, end = described["data_offsets"]
        dtype, shape = DTYPES[described["dtype"]], tuple(described["shape"])
        if (
            not all(type(number) is int and number >= 0 for number in (begin, end, *shape))
            or not begin <= end <= size - len(head)
            or end - begin != math.prod(shape) * dtype.itemsize
            or (name in complex128 and (dtype is not torch.float64 or shape[-1:] != (2,)))
        ):
            raise ValueError(f"the tensor {name} cannot be {described!r:.200}")
        entries.append(Entry(name, dtype, shape, len(head) + begin, len(head) + end))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = len(head)
    for entry in entries:  # no gaps: a small header must not make forge read a huge file
        if entry.begin != end:
            raise ValueError(
                f"the tensor {entry.name} should begin at byte {end}, not at {entry.begin}"
            )
        end = entry.end
    if end != size:
        raise ValueError(f"its header describes {end} bytes, but the file has {size}")
    return {entry.name: entry for entry in entries}, complex128
