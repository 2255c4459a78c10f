"""Private parts of Weights & Biases: what an offline run has on disk."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_START = b":W&B\xe1\xbe\x00"
"""The first bytes of the file; the last one is its version."""
_BLOCK = 1 << 15
_HEAD = struct.Struct("<IHB")
"""Before each piece of a record: a checksum, the piece's length, and which piece it is."""
_WHOLE, _LAST = 1, 4


def last_step(file: Path) -> int:
    """The last step in the file of an offline run; -1 if there is none.

    If it goes: keep the step of the last `finish` in the job's directory, and send again only what
    came after it; the rows that were on disk by then are repeated.

    Raises:
        ValueError: If the file has another format.
    """
    content = file.read_bytes()
    if not _START.startswith(content[: len(_START)]):  # a kill can tear that, too
        raise ValueError(f"{file}: expected a file of Weights & Biases, found another format")
    from wandb.proto.wandb_internal_pb2 import Record

    found = [Record.FromString(one) for one in records(content)]
    return max((one.history.step.num for one in found if one.HasField("history")), default=-1)


def records(content: bytes) -> Iterator[bytes]:
    """The complete records; the last block can be missing after a kill.

    If it goes: see `last_step`.
    """
    at, record = len(_START), b""
    while at + _HEAD.size <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        _, size, piece = _HEAD.unpack_from(content, at)
        at += _HEAD.size + size
        if at > len(content) or piece == 0:
            return
        record += content[at - size : at]
        if piece in (_WHOLE, _LAST):
            yield record
            record = b""
