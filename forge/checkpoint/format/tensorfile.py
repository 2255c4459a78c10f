"""Tensors in one file, in safetensors layout.

    8 bytes: length of the header | the header, JSON | the tensors' bytes, without gaps

`safetensors.torch.load_file` reads it. complex128, which the format lacks, is stored as pairs of
float64 and listed in the header's metadata. Source: the safetensors format specification.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from forge.errors import CheckpointError

MALFORMED = (
    *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError),
    *(RuntimeError, AssertionError, MemoryError),  # RecursionError is a RuntimeError
)
"""Exceptions that reading a malformed value can raise."""

MAX_HEADER = 100_000_000
"""Size limit of the header in the specification."""

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
"""The format's names of dtypes."""

WRITTEN = {*DTYPES.values(), torch.complex128}
"""Dtypes that can be saved."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Layout:
    """The positions of the tensors in one file.

    Args:
        tensors: By name, of dtypes in `WRITTEN`; the layout depends on dtypes and shapes only.
    Raises:
        CheckpointError: If names and shapes exceed the size limit of the header.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        # Widest dtype first, so that every tensor begins at a multiple of its item size.
        names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        header: dict[str, Any] = {}
        complex128: list[str] = []
        spans: dict[str, tuple[int, int]] = {}
        offset = 0
        for name in names:
            tensor = tensors[name]
            shape = list(tensor.shape)
            if tensor.dtype is torch.complex128:
                complex128.append(name)
                dtype_name, shape = "F64", [*shape, 2]
            else:
                dtype_name = _NAMES[tensor.dtype]
            end = offset + tensor.numel() * tensor.dtype.itemsize
            header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [offset, end]}
            spans[name] = offset, end
            offset = end
        header["__metadata__"] = {"format": "pt", "complex128": json.dumps(complex128)}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)  # complex128 needs 16, other libraries like 64
        if len(text) > MAX_HEADER:
            raise CheckpointError(
                f"The names and shapes of {len(tensors)} tensors are {len(text)} bytes of JSON; the"
                f" limit is {MAX_HEADER}. Let state_dict() return fewer, larger tensors."
            )
        self.head = len(text).to_bytes(8, "little") + text
        """The bytes before the tensors: header length and header."""
        begin = len(self.head)
        self.spans = {name: (begin + a, begin + b) for name, (a, b) in spans.items()}
        """Name -> begin and end in the file, in the order of the file."""
        self.size = begin + offset
        """Bytes of the file."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; its bytes are those from `begin` up to `end`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def parse(head: bytes, size: int) -> dict[str, Entry]:
    """The tensors of a file of `size` bytes that begins with `head`, a `Layout.head`.

    Raises:
        MALFORMED: Any of these exceptions, if a Layout cannot have made it.
    """
    header = json.loads(head[8:])
    complex128 = set(json.loads(header.pop("__metadata__", {}).get("complex128", "[]")))
    entries: dict[str, Entry] = {}
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
        if name in complex128:
            dtype, shape = torch.complex128, shape[:-1]
        entries[name] = Entry(dtype, shape, len(head) + begin, len(head) + end)
    end = len(head)
    # No gaps: a small header must not make forge read a huge file.
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(f"the tensor {name} should begin at byte {end}, not at {entry.begin}")
        end = entry.end
    if end != size:
        raise ValueError(f"its header describes {end} bytes, but the file has {size}")
    return entries
