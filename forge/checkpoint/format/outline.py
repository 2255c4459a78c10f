"""The outline of a state before its tensors are read: their dtypes, shapes and uses."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

from forge.checkpoint.format.shards import Shard
from forge.errors import DamagedCheckpoint

UNKNOWN = object()
"""In an outline: a leaf that cannot be decoded without its data."""

_CPU = torch.device("cpu")


def is_here(device: torch.device) -> bool:
    """Whether this process can create tensors and generators on the device."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not getattr(module, "is_available", bool)():
        return device.type == "cpu"
    return (device.index or 0) < int(module.device_count())


def _device_of(value: dict[str, Any]) -> torch.device:
    if "device" not in value:
        return _CPU
    device = torch.device(value["device"])
    return device if is_here(device) else _CPU  # loading moves it to the parameter's device


class Outline(dict[str, torch.Tensor]):
    """Tensors without data: pass it to `decode` to get a state's outline.

    A leaf that needs data to be decoded becomes `UNKNOWN`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.uses: collections.Counter[str] = collections.Counter()
        """How often the state refers to each tensor."""
        self.strides: dict[str, list[int]] = {}
        """Strides of tensors whose elements are not in the usual order."""
        self.devices: dict[str, torch.device] = {}
        self.shards: dict[str, Shard] = {}
        """Name of a sharded tensor -> which part of the whole it is."""
        self.names: dict[int, str] = {}
        """`id` of a leaf -> the name of its tensor."""
        self._leaves: dict[str, torch.Tensor] = {}

    def note(self, name: str, value: dict[str, Any], shard: Shard | None = None) -> torch.Tensor:
        """Record a reference to the tensor `name`; returns a leaf for it.

        The leaf of a shard has the shape of the whole tensor.
        """
        self.uses[name] += 1
        self.devices[name] = _device_of(value)
        if "stride" in value:
            self.strides[name] = value["stride"]
        if shard is not None:
            if tuple(self[name].shape) != shard.box.shape or shard != self.shards.get(name, shard):
                raise DamagedCheckpoint(
                    f"{name}: expected {shard}, found a tensor of shape {list(self[name].shape)}"
                )
            self.shards[name] = shard
        if name not in self._leaves:
            leaf = self[name]
            if shard is not None:
                leaf = torch.empty(shard.of, dtype=leaf.dtype, device="meta")
            self._leaves[name] = leaf
            self.names[id(leaf)] = name
        return self._leaves[name]
