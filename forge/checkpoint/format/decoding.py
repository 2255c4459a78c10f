"""Decode what `encoding.py` has encoded, without executing or importing anything that it names.

A start from a checkpoint decodes the state twice: first with tensors that have no data
(`Outline` in `reading.py`), to compare it with the live objects, then with those that were read.
"""

from __future__ import annotations

import base64
import collections
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forge.checkpoint.format import shards
from forge.checkpoint.format.encoding import is_dense
from forge.checkpoint.format.shards import Shard
from forge.checkpoint.format.tensorfile import MALFORMED
from forge.compat import of_torch
from forge.errors import DamagedCheckpoint


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that was passed to `Encoder.encode`.

    Raises:
        DamagedCheckpoint: If an encoder cannot have written `value`.
    """
    return Decoder(tensors).decode(value)


class Decoder:
    """Decodes trees, with the tensors of these names.

    `Outline` (`reading.py`) replaces `tensor`, `sharded` and `malformed`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def decode(self, value: Any) -> Any:
        """The tree that was passed to `Encoder.encode`; raises as the function does."""
        try:
            return self.inner(value)
        except RecursionError:
            raise DamagedCheckpoint(
                "its values are nested too deeply for Python's recursion limit"
                " (sys.setrecursionlimit)"
            ) from None

    def inner(self, value: Any) -> Any:
        """Decode a value inside the tree."""
        if isinstance(value, list):
            return [self.inner(v) for v in value]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("!")), None)
        if tag is None:
            return {key: self.inner(v) for key, v in value.items()}
        if tag not in _DECODERS:
            raise DamagedCheckpoint(f"unknown tag {tag!r}: written by a newer forge?")
        try:
            return _DECODERS[tag](value, self)
        except RecursionError:
            raise
        except MALFORMED as error:
            return self.malformed(tag, error)

    def pairs(self, items: list[list[Any]]) -> list[tuple[Any, Any]]:
        """Decode the items of a dict."""
        return [(self.inner(key), self.inner(v)) for key, v in items]

    def tensor(self, described: dict[str, Any]) -> torch.Tensor:
        """The tensor of this name, with these strides."""
        name = described["!tensor"]
        tensor = self._tensors[name]
        stride = stride_of(described, tensor.shape)
        if stride and tensor.stride() != stride and not shards.is_sharded(tensor):
            tensor = _in_order(tensor, stride)
        self._tensors[name] = tensor  # so that tied tensors are tied again
        return tensor

    def sharded(self, described: dict[str, Any], shard: Shard) -> torch.Tensor:
        """The tensor of this name, which was a shard when it was saved."""
        return self._tensors[described["!tensor"]]

    def malformed(self, tag: str, error: Exception) -> Any:
        """Raise DamagedCheckpoint, or return what a malformed value becomes."""
        raise DamagedCheckpoint(f"a value tagged {tag!r} cannot be read: {error!r}") from error


def stride_of(described: dict[str, Any], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements are not in the usual order; else empty."""
    stride = tuple(described.get("stride", ()))
    if stride and not (all(type(s) is int for s in stride) and is_dense(shape, stride)):
        # Such strides could allocate any amount of memory.
        raise DamagedCheckpoint(f"the strides {stride} do not fit a tensor of shape {list(shape)}")
    return stride


def _in_order(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return torch.empty_strided(shape, tuple(stride), dtype=dtype, device=device).copy_(tensor)


def _float(text: str) -> float:
    if len(text) == 16:
        return float(struct.unpack("<d", bytes.fromhex(text))[0])
    return float(text)


def _decode_ordered(value: dict[str, Any], decoder: Decoder) -> Any:
    decoded = collections.OrderedDict(decoder.pairs(value["!OrderedDict"]))
    if "metadata" in value:
        versions = collections.OrderedDict(decoder.inner(value["metadata"]))
        of_torch.set_layer_versions(decoded, versions)
    return decoded


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise DamagedCheckpoint(f"torch.{name} is not a dtype")
    return found


def _decode_sparse(value: dict[str, Any], decoder: Decoder) -> torch.Tensor:
    named = {name: decoder.tensor(one) for name, one in value["parts"].items()}
    return _sparse(value["!sparse"], named)


def _sparse(described: list[Any], named: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sparse tensor that `describe_sparse` described; raises if an index is out of range."""
    size, is_coalesced = described
    return torch.sparse_coo_tensor(
        named["indices"],
        named["values"],
        size,
        device=named["values"].device,
        is_coalesced=is_coalesced,
        check_invariants=True,
    )


def _decode_numpy_scalar(value: dict[str, Any], decoder: Decoder) -> Any:
    *description, raw = value["!numpy_scalar"]
    return _numpy_scalar(description, base64.b64decode(raw))


def _decode_ndarray(value: dict[str, Any], decoder: Decoder) -> Any:
    content = bytes(decoder.tensor(value["bytes"]).contiguous().numpy())
    return _numpy_array(value["!ndarray"], content)


def _numpy_scalar(description: list[Any], content: bytes) -> Any:
    """The scalar that `describe_array` described."""
    import numpy

    (described,) = description
    dtype = numpy.dtype(described)
    if not dtype.itemsize:
        return dtype.type()  # an empty string
    return numpy.frombuffer(content, dtype=dtype).copy()[0]


def _numpy_array(description: list[Any], content: bytes) -> Any:
    """The array that `describe_array` described."""
    import numpy

    described, shape, *notes = description
    dtype = numpy.dtype(described)
    count = math.prod(shape)
    if count * dtype.itemsize != len(content):
        raise ValueError(f"expected {count} values of {dtype}, found {len(content)} bytes")
    flat = numpy.frombuffer(content, dtype=dtype) if count else numpy.empty(0, dtype=dtype)
    made = flat.reshape(shape, order="F" if "F" in notes else "C").copy("K")
    made.flags.writeable = "read-only" not in notes
    return made


_DECODERS: dict[str, Callable[[dict[str, Any], Decoder], Any]] = {
    "!tensor": lambda v, d: d.tensor(v),
    "!shard": lambda v, d: d.sharded(v["part"], Shard.from_json(v["!shard"])),
    "!sparse": _decode_sparse,
    "!OrderedDict": _decode_ordered,
    "!Counter": lambda v, d: collections.Counter(dict(d.pairs(v["!Counter"]))),
    "!dict": lambda v, d: dict(d.pairs(v["!dict"])),
    "!tuple": lambda v, d: tuple(d.inner(v["!tuple"])),
    "!set": lambda v, d: set(d.inner(v["!set"])),
    "!frozenset": lambda v, d: frozenset(d.inner(v["!frozenset"])),
    "!size": lambda v, d: torch.Size(v["!size"]),
    "!int": lambda v, d: int(v["!int"], 16),
    "!float": lambda v, d: _float(v["!float"]),
    "!complex": lambda v, d: complex(*d.inner(v["!complex"])),
    "!bytes": lambda v, d: base64.b64decode(v["!bytes"]),
    "!bytearray": lambda v, d: bytearray(base64.b64decode(v["!bytearray"])),
    "!dtype": lambda v, d: _dtype(v["!dtype"]),
    "!device": lambda v, d: torch.device(v["!device"]),
    "!numpy_scalar": _decode_numpy_scalar,
    "!ndarray": _decode_ndarray,
}
