"""Sharded tensors: which box of the whole tensor a rank has, and how boxes overlap.

A shard is saved like any tensor, together with its position in the whole. So it can be read back
as it was, or in pieces into whatever box another rank has after the sharding has changed.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forge.compat import of_torch


@dataclass(frozen=True)
class Box:
    """A box of a tensor: `shape[i]` indices of each dimension, from `offset[i]` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All of a tensor of that shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """The overlap of two boxes, or None."""
        ends = [
            (max(a, b), min(a + m, b + n))
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(end <= begin for begin, end in ends):
            return None
        return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    def seen_from(self, other: Box) -> Box:
        """The same box, with its offset relative to `other`."""
        offset = tuple(a - b for a, b in zip(self.offset, other.offset, strict=True))
        return Box(offset, self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Slices that index a tensor."""
        pairs = zip(self.offset, self.shape, strict=True)
        return tuple(slice(begin, begin + count) for begin, count in pairs)

    def begin_in(self, shape: Sequence[int]) -> int | None:
        """Index of the box's first element in the memory of a contiguous tensor of that shape.

        None if the box is not contiguous there.
        """
        cut = [i for i, size in enumerate(shape) if size != self.shape[i]]
        if cut and any(count != 1 for count in self.shape[: cut[-1]]):
            return None
        begin = 0
        for offset, size in zip(self.offset, shape, strict=True):
            begin = begin * size + offset
        return begin


@dataclass(frozen=True)
class Shard:
    """The part of a whole tensor that one rank has."""

    of: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box

    def to_json(self) -> dict[str, list[int]]:
        """Encode it for the state's JSON."""
        return {"of": list(self.of), "at": list(self.box.offset), "shape": list(self.box.shape)}

    @staticmethod
    def from_json(described: dict[str, Any]) -> Shard:
        """Decode the result of `to_json`.

        Raises:
            ValueError: If the box is not inside the tensor.
        """
        of, at, shape = (tuple(described[key]) for key in ("of", "at", "shape"))
        is_inside = len(of) == len(at) == len(shape) and all(
            type(n) is type(a) is type(b) is int and min(a, b) >= 0 and a + b <= n
            for n, a, b in zip(of, at, shape, strict=True)
        )
        if not is_inside:
            raise ValueError(
                f"a slice of shape {shape} at offset {at} is not inside a tensor of shape {of}"
            )
        return Shard(of, Box(at, shape))


@dataclass(frozen=True)
class Like:
    """Stands in for a live tensor that does not exist yet: shard it like this one."""

    tensor: torch.Tensor


def is_sharded(value: Any) -> bool:
    """Whether it is a DTensor; does not import torch.distributed if the program has not."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local(value: Any) -> Any:
    """The local tensor of a DTensor, sharing its memory; any other value as it is."""
    if not is_sharded(value):
        return value
    with torch.no_grad():
        return value.to_local()


def is_unique(tensor: Any) -> bool:
    """Whether no two ranks have the same part of a DTensor."""
    return not any(one.is_replicate() for one in tensor.placements)


def problem(tensor: Any) -> str | None:
    """Why a DTensor cannot be saved, or None."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    if type(tensor).__name__ != "DTensor":
        return f"a tensor of the subclass {type(tensor).__qualname__}"
    odd = [one for one in tensor.placements if type(one) not in (Sharded, Replicate)]
    if odd:
        return (
            f"a DTensor with the placement {type(odd[0]).__name__} (supported are Shard and"
            " Replicate; FSDP2 over tensor parallelism is not)"
        )
    if not local(tensor).is_contiguous():
        return "a DTensor whose local tensor is not contiguous"
    if _shard_of(tensor) is None:
        return (
            f"a DTensor whose local shape, {list(local(tensor).shape)}, does not match its"
            " placements"
        )
    return None


def shard_of(tensor: Any) -> Shard:
    """This rank's part of a DTensor."""
    shard = _shard_of(tensor)
    assert shard is not None, "refused by `problem`"
    return shard


def _shard_of(tensor: Any) -> Shard | None:
    whole, shape = tuple(tensor.shape), tuple(local(tensor).shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside the device mesh has no shard
        return Shard(whole, Box((0,) * len(whole), (0,) * len(whole)))
    return _shard_at(whole, shape, mesh, tensor.placements, tuple(coordinate))


@functools.lru_cache(maxsize=1 << 12)
def _shard_at(
    whole: tuple[int, ...], shape: tuple[int, ...], mesh: Any, placements: Any, coordinate: Any
) -> Shard | None:
    """Cached: at each save this would take longer than the rest of the work for a tensor."""
    offset = of_torch.shard_offset(whole, shape, mesh, placements)
    return Shard(whole, Box(offset, shape)) if offset is not None else None


def wrapped(own: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor from this rank's local tensor, sharded like `like`."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made
