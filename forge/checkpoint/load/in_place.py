"""Which live tensors a checkpoint can be read straight into."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from forge.checkpoint.format.codec import Outline
from forge.checkpoint.format.tensor_encoding import PLAIN_TYPES


def targets(outline: Outline, pairs: Iterable[tuple[Any, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The live tensors that can be read into, by the names of what belongs there.

    Not where something else in the state refers to the same data, and would see it change.
    """
    names = {id(tensor): name for name, tensor in outline.items()}
    offers: dict[str, list[torch.Tensor]] = {}
    for leaf, live in pairs:
        if id(leaf) in names:
            offers.setdefault(names[id(leaf)], []).append(live)
    refused = _overlapping(offers)
    return {
        name: lives[0]
        for name, lives in offers.items()
        if name not in refused
        and len(lives) == outline.uses[name]
        and name not in outline.strides
        and all(_can_take(live, outline[name]) for live in lives)
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
    return (
        type(live) in PLAIN_TYPES
        and live.layout is torch.strided
        and live.device.type in ("cpu", "cuda")
        and not live.is_nested
    )


def _overlapping(offers: dict[str, list[torch.Tensor]]) -> set[str]:
    """Names whose live tensors share memory with those of others: there, the order matters."""
    spans = sorted(
        (str(live.device), *_span(live), name)
        for name, lives in offers.items()
        for live in lives
        if _has_memory(live)
    )
    found: set[str] = set()
    reach = spans[0] if spans else None  # the span that goes furthest so far
    for span in spans[1:]:
        assert reach is not None
        if span[0] == reach[0] and span[1] < reach[2] and span[3] != reach[3]:
            found |= {span[3], reach[3]}
        if (span[0], span[2]) > (reach[0], reach[2]):
            reach = span
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    begin, count = tensor.data_ptr(), tensor.numel()
    if count and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in steps)
    return begin, begin + count * tensor.dtype.itemsize
