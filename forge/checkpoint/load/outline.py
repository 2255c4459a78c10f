"""The outline of a state before its tensors are read, and which of them are read in place.

A tensor is read into the live tensor that is offered for it, unless another part of the state
refers to the same data, which would change with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from forge.checkpoint.format import shards
from forge.checkpoint.format.codec import Decoder, stride_of
from forge.checkpoint.format.shards import Box, Like, Shard
from forge.checkpoint.format.tensor_encoding import is_here, is_plain
from forge.checkpoint.load.rank_files import RankFiles
from forge.errors import DamagedCheckpoint, StateMismatch

UNKNOWN = object()
"""In an outline: a leaf that cannot be decoded without its data."""

Offers = Iterable[tuple[Any, "torch.Tensor | Like"]]
"""Pairs of a leaf of an outline and its live tensor, or a tensor that is sharded like it."""

_CPU = torch.device("cpu")


@dataclass(eq=False)
class SavedTensor:
    """A tensor of a state: how it was saved, and what is offered for it."""

    leaf: torch.Tensor
    """A tensor without data, of the shape of the whole tensor."""
    shard: Shard | None
    box: Box
    """The part of the whole tensor that this rank needs."""
    device: torch.device
    uses: int = 0
    """How often the state refers to it."""
    is_reordered: bool = False
    """Whether its elements are not in the usual order."""
    like: torch.Tensor | None = None
    """A live DTensor, if it has to be sharded like that one."""
    offers: list[torch.Tensor] = field(default_factory=list)
    live: torch.Tensor | None = None
    """The live tensor that it is read into; None: a new one."""


class Outline(Decoder):
    """Decodes a rank's state with tensors that have no data, and notes how it uses each of them.

    A leaf that needs data to be decoded becomes `UNKNOWN`.
    """

    def __init__(self, files: RankFiles, rank: int) -> None:
        super().__init__({})
        self._files = files
        self._rank = rank
        self.saved: dict[str, SavedTensor] = {}
        """The tensors that the state refers to, by name."""
        self._names: dict[int, str] = {}
        """`id` of a leaf -> the name of its tensor."""
        for one in (0, rank):
            files.tensors(one)  # verified even if the state has no tensors

    def tensor(self, described: dict[str, Any], shard: Shard | None = None) -> torch.Tensor:
        """A leaf for the tensor; if it was sharded, it has the shape of the whole tensor."""
        name = described["!tensor"]
        _, entry = self._files.find(self._rank, name)
        saved = self.saved.get(name)
        if saved is None:
            shape = entry.shape if shard is None else shard.of
            leaf = torch.empty(shape, dtype=entry.dtype, device="meta")
            device = _device_of(described)
            saved = self.saved[name] = SavedTensor(leaf, shard, Box.whole(shape), device)
            self._names[id(leaf)] = name
        if shard != saved.shard or (shard is not None and shard.box.shape != entry.shape):
            raise DamagedCheckpoint(
                f"{name}: expected {shard}, found a tensor of shape {list(entry.shape)}"
            )
        saved.uses += 1
        saved.is_reordered |= bool(stride_of(described, entry.shape))
        return saved.leaf

    sharded = tensor

    def malformed(self, tag: str, error: Exception) -> Any:
        """`UNKNOWN`: some values cannot be decoded without their data."""
        return UNKNOWN

    def offer(self, pairs: Offers) -> None:
        """Choose the memory that each tensor is read into.

        Raises:
            StateMismatch: If one saved tensor corresponds to live tensors with different shardings.
        """
        for leaf, offered in pairs:
            name = self._names.get(id(leaf))
            if name is None:
                continue
            saved = self.saved[name]
            live = offered.tensor if isinstance(offered, Like) else offered
            if shards.is_sharded(live):
                box = shards.shard_of(live).box
                if saved.like is None:
                    saved.like, saved.box = live, box
                if saved.box != box:
                    raise StateMismatch(
                        f"{name}: was one (tied) tensor when it was saved, but is sharded in two"
                        " different ways here. Tie the parameters before fully_shard, as when it"
                        " was saved"
                    )
            if not isinstance(offered, Like):
                saved.offers.append(live)
        shared = _sharing(self.saved)
        for saved in self.saved.values():
            if saved not in shared and _can_take(saved):
                saved.live = saved.offers[0]


def _device_of(described: dict[str, Any]) -> torch.device:
    if "device" not in described:
        return _CPU
    device = torch.device(described["device"])
    return device if is_here(device) else _CPU  # loading moves it to the parameter's device


def _can_take(saved: SavedTensor) -> bool:
    if not saved.offers or len(saved.offers) != saved.uses or saved.is_reordered:
        return False
    dtype, shape = saved.leaf.dtype, saved.box.shape
    return all(
        _has_memory(live)
        and (live.dtype, tuple(live.shape)) == (dtype, shape)
        and live.numel() > 0
        and live.is_contiguous()
        and not (live.is_conj() or live.is_neg())
        for live in map(shards.local, saved.offers)
    )


def _has_memory(live: torch.Tensor) -> bool:
    return is_plain(live) and live.device.type in ("cpu", "cuda")


def _sharing(saved: dict[str, SavedTensor]) -> set[SavedTensor]:
    """Those whose live tensors share storage with another's: the order of reading would matter."""
    users: dict[tuple[torch.device, int], set[SavedTensor]] = {}
    for one in saved.values():
        for live in filter(_has_memory, map(shards.local, one.offers)):
            storage = live.device, live.untyped_storage().data_ptr()
            users.setdefault(storage, set()).add(one)
    return {one for some in users.values() if len(some) > 1 for one in some}
