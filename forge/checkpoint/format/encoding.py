"""Encode a state as JSON and tensors, exactly; `decoding.py` decodes it.

The result of `state_dict()` is walked as a tree. Plain values are written as JSON; values that
JSON would change (tuples, integer keys, NaN) are tagged by a key that begins with `!`. Tensors
become references into one flat dictionary. A value that cannot be saved exactly is an error with
its path.

A tensor keeps its bits, dtype, shape, layout and device, and its strides if the elements fill
memory without gaps. Two tensors with the same memory and shape are one tensor again after
decoding; slices and other views become separate tensors, and a Parameter becomes a plain tensor.
"""

from __future__ import annotations

import base64
import collections
import functools
import hashlib
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from forge.checkpoint.format import shards, tensor_encoding
from forge.checkpoint.format.shards import Shard
from forge.checkpoint.format.tensor_encoding import digest
from forge.compat import of_torch
from forge.errors import CheckpointError

MAX_DEPTH = 100
"""Nested containers at most; Python's recursion limit would depend on the caller's stack depth."""

MAX_STATE_BYTES = 1 << 30
"""Size limit of the JSON: parsing takes many times as much memory."""

UNKNOWN = object()
"""In a state that is decoded before its tensors are read: a leaf that needs their data."""

_SHORT = 1 << 256
"""An integer from here on is written in hexadecimal: Python converts at most 4300 digits."""
_NAN = struct.pack("<d", math.nan)


class Encoder:
    """Encodes trees; `tensors` collects all tensors, each shared one only once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.sharded: list[str] = []
        """Paths of sharded tensors."""
        self.unshared: set[str] = set()
        """Names of shards of which no other rank has a replica."""
        self._names: dict[tuple[Any, ...], str] = {}
        self._depth = 0

    def encode(self, value: Any, path: str = "") -> Any:
        """JSON for `value`.

        Raises:
            CheckpointError: Names the leaf that cannot be saved.
        """
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -_SHORT < value < _SHORT else {"!int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": _odd_float(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if self._depth == MAX_DEPTH:
            raise CheckpointError(
                f"{path[:60]}…: cannot be saved, since it is nested in more than {MAX_DEPTH}"
                " containers, or a container contains itself"
            )
        self._depth += 1
        try:
            return self._container(value, kind, path)
        except RecursionError:
            raise CheckpointError(
                f"{path[:60]}: cannot be saved, since Python's recursion limit was reached. Save"
                " from fewer nested calls, or raise the limit with sys.setrecursionlimit."
            ) from None
        finally:
            self._depth -= 1

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._dict(value, path)
        if kind in (tuple, set, frozenset, torch.Size):
            name = "size" if kind is torch.Size else kind.__name__
            items = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {f"!{name}": self._items(items, path)}
        if kind in (collections.OrderedDict, collections.Counter):
            extra = getattr(value, "__dict__", {}).keys() - {of_torch.LAYER_VERSIONS}
            if extra:
                raise CheckpointError(
                    f"{path}: a {kind.__name__} with extra attributes ({', '.join(extra)}) cannot"
                    " be saved exactly"
                )
            encoded: dict[str, Any] = {f"!{kind.__name__}": self._pairs(value, path)}
            versions = of_torch.layer_versions(value)
            if versions is not None:
                encoded["metadata"] = self.encode(dict(versions), path)
            return encoded
        return self._leaf(value, kind, path)

    def _leaf(self, value: Any, kind: type, path: str) -> Any:
        if kind in (bytes, bytearray):
            return {f"!{kind.__name__}": base64.b64encode(value).decode()}
        if kind is complex:
            return {"!complex": [self.encode(value.real), self.encode(value.imag)]}
        if kind is torch.dtype:
            return {"!dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"!device": str(value)}
        described = tensor_encoding.describe_array(value)
        if described is None:
            raise CheckpointError(
                f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be saved exactly."
                " A checkpoint can contain tensors, arrays, numbers, strings, bytes and plain"
                " containers of them: let state_dict() return those (for an enum its name, for a"
                " namedtuple a dict)."
            )
        tag, description, content = described
        if tag == "!numpy_scalar":
            return {tag: [*description, base64.b64encode(content).decode()]}
        raw = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        return {tag: description, "bytes": self._tensor(raw[: len(content)], path)}

    def _items(self, value: Any, path: str) -> list[Any]:
        if set(map(type, value)) == {int} and -_SHORT < min(value) <= max(value) < _SHORT:
            return list(value)  # as `encode`, but many times as fast for random states
        return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("!") for key in value):
            return {key: self.encode(v, _join(path, key)) for key, v in value.items()}
        return {"!dict": self._pairs(value, path)}

    def _pairs(self, value: dict[Any, Any], path: str) -> list[list[Any]]:
        return [
            [self._key(key, path), self.encode(v, _join(path, key))] for key, v in value.items()
        ]

    def _key(self, key: Any, path: str) -> Any:
        if isinstance(key, torch.Tensor):  # tensors hash by identity, not by value
            raise CheckpointError(f"{path}: a dict with a tensor as a key cannot be saved")
        return self.encode(key, f"{path}<key>")

    def _shard(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        problem = shards.problem(tensor)
        if problem:
            raise CheckpointError(f"{path}: this version of forge cannot save {problem}")
        shard = shards.shard_of(tensor)
        self.sharded.append(path)
        own = shards.local(tensor).reshape(shard.box.shape)
        encoded = self._tensor(own, path, shard)
        if shards.is_unique(tensor):
            self.unshared.add(encoded["!tensor"])
        return {"!shard": shard.to_json(), "part": encoded}

    def _tensor(
        self, tensor: torch.Tensor, path: str, shard: Shard | None = None
    ) -> dict[str, Any]:
        if shards.is_sharded(tensor):
            return self._shard(tensor, path)
        problem = tensor_encoding.problem(tensor)
        if problem:
            raise CheckpointError(f"{path}: this version of forge cannot save {problem}")
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            if shard is not None:
                raise CheckpointError(f"{path}: this version of forge cannot save a sparse DTensor")
            described, named = tensor_encoding.describe_sparse(tensor)
            references = {k: self._tensor(one, _join(path, k)) for k, one in named.items()}
            return {"!sparse": described, "parts": references}
        shape, stride, device = tensor.shape, tensor.stride(), tensor.device
        # Conjugate and negative views have the same memory, but not the same values.
        views = (tensor.is_conj(), tensor.is_neg())
        # A shard, and its local tensor registered separately, are two leaves.
        same = (tensor.data_ptr(), tensor.dtype, shape, stride, views, device, shard)
        name = self._names.get(same) if tensor.numel() else None
        if name is None:
            name = self._new_name(path)
            self._names[same] = name
            self.tensors[name] = tensor
        encoded: dict[str, Any] = {"!tensor": name}
        if _is_reordered(shape, stride):
            encoded["stride"] = list(stride)
        if device.type != "cpu":
            encoded["device"] = str(device)
        return encoded

    def _new_name(self, path: str) -> str:
        name = path.encode(errors="replace").decode() or "tensor"  # safetensors needs UTF-8
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            name += "'"
        return name


def state_text(tree: Any) -> bytes:
    """The JSON of an encoded state; CheckpointError if it is larger than a resume accepts."""
    text = json.dumps(tree).encode()
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"The state without its tensors is {len(text)} bytes of JSON; the limit is"
            f" {MAX_STATE_BYTES}. Let state_dict() return large lists as tensors."
        )
    return text


def fingerprint(state: Any) -> str:
    """A hash that is equal for equal values, to compare two states without keeping both.

    Raises:
        CheckpointError: If the state cannot be saved; names the leaf.
    """
    encoder = Encoder()
    found = hashlib.blake2b(json.dumps(encoder.encode(state)).encode(), digest_size=16)
    for name, tensor in encoder.tensors.items():
        found.update(f"{name} {digest(tensor)}".encode(errors="replace"))
    return found.hexdigest()


def _odd_float(value: float) -> str:
    """A float that JSON lacks, as a string; all bits of a NaN, since there are many NaNs."""
    raw = struct.pack("<d", value)
    return raw.hex() if math.isnan(value) and raw != _NAN else repr(value)


def _join(path: str, key: Any) -> str:
    try:
        shown = str(key)
    except ValueError:  # an integer of more than 4300 digits
        shown = f"<{type(key).__name__}>"
    return f"{path}.{shown}" if path else shown


@functools.lru_cache(maxsize=1 << 14)
def _is_reordered(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory, but not in the order of a contiguous tensor."""
    return stride != torch.empty(shape, device="meta").stride() and is_dense(shape, stride)


def is_dense(shape: Sequence[int], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order."""
    expected = 1
    for distance, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if distance != expected:
                return False
            expected *= size
    return True
