"""Which live tensors a checkpoint can be read into directly, without a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from forge.checkpoint.format import shards
from forge.checkpoint.format.outline import Outline
from forge.checkpoint.format.shards import Like
from forge.checkpoint.format.tensor_encoding import is_plain
from forge.errors import StateMismatch

Offers = Iterable[tuple[Any, "torch.Tensor | Like"]]
"""Pairs of a leaf of an outline and its live tensor, or a tensor that is sharded like it."""


def shardings(outline: Outline, pairs: Offers) -> dict[str, torch.Tensor]:
    """Name -> live DTensor, for each tensor that has to be sharded like that one.

    Raises:
        StateMismatch: If one saved tensor corresponds to live tensors with different shardings.
    """
    found: dict[str, torch.Tensor] = {}
    for leaf, offered in pairs:
        live = offered.tensor if isinstance(offered, Like) else offered
        name = outline.names.get(id(leaf))
        if name is None or not shards.is_sharded(live):
            continue
        if shards.shard_of(found.setdefault(name, live)) != shards.shard_of(live):
            raise StateMismatch(
                f"{name}: was one (tied) tensor when it was saved, but is sharded in two different"
                " ways here. Tie the parameters before fully_shard, as when it was saved"
            )
    return found


def targets(outline: Outline, pairs: Offers) -> dict[str, torch.Tensor]:
    """Name -> live tensor, for each saved tensor that can be read into it directly.

    Left out if another part of the state refers to the same data, which would change with it.
    """
    offers: dict[str, list[torch.Tensor]] = {}
    for leaf, live in pairs:
        if id(leaf) in outline.names and not isinstance(live, Like):
            offers.setdefault(outline.names[id(leaf)], []).append(live)
    refused = _shared(offers)
    return {
        name: lives[0]
        for name, lives in offers.items()
        if name not in refused
        and len(lives) == outline.uses[name]
        and name not in outline.strides
        and all(_can_take(shards.local(live), outline[name]) for live in lives)
    }


def _can_take(live: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        _has_memory(live)
        and (live.dtype, live.shape) == (tensor.dtype, tensor.shape)
        and live.numel() > 0
        and live.is_contiguous()
        and not (live.is_conj() or live.is_neg())
    )


def _has_memory(live: torch.Tensor) -> bool:
    return is_plain(live) and live.device.type in ("cpu", "cuda")


def _shared(offers: dict[str, list[torch.Tensor]]) -> set[str]:
    """Names whose live tensors share storage with other names': the order of reading matters."""
    names_in: dict[tuple[torch.device, int], set[str]] = {}
    for name, lives in offers.items():
        for live in filter(_has_memory, map(shards.local, lives)):
            place = live.device, live.untyped_storage().data_ptr()
            names_in.setdefault(place, set()).add(name)
    return {name for names in names_in.values() if len(names) > 1 for name in names}
