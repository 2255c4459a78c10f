"""Finds tensors that share memory: tied weights, views, arrays made from a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from forge.checkpoint.format import shards
from forge.checkpoint.format.tensor_encoding import is_plain

_CPU = torch.device("cpu")


def span(value: Any) -> tuple[str, int, int] | None:
    """Device, first and last address of a tensor or a numpy array; None if it has no memory."""
    value = shards.local(value)
    if isinstance(value, torch.Tensor):
        if not is_plain(value) or value.is_meta or not value.numel():
            return None
        device, begin, size = value.device, value.data_ptr(), value.dtype.itemsize
        if value.is_contiguous():  # the usual case, and this runs at every save
            return str(device), begin, begin + value.numel() * size
        steps = [step * size for step in value.stride()]
    else:
        if not value.size:
            return None
        device, begin, size = _CPU, value.__array_interface__["data"][0], value.dtype.itemsize
        steps = value.strides
    reach = [(count - 1) * step for count, step in zip(value.shape, steps, strict=True)]
    low, high = (sum(pick(0, one) for one in reach) for pick in (min, max))
    return str(device), begin + low, begin + high + size


def groups(named: Iterable[tuple[str, Any]]) -> list[list[str]]:
    """Names of tensors and arrays that are one object, or whose memory overlaps.

    Returns:
        Each group with at least two names, sorted.
    """
    names: dict[int, list[str]] = {}
    values: dict[int, Any] = {}
    for name, value in named:
        names.setdefault(id(value), []).append(name)
        values[id(value)] = value
    spans = {id_: span(value) for id_, value in values.items()}
    found = [names[id_] for id_, place in spans.items() if place is None]
    last: tuple[str, int] = "", 0
    for (device, begin, end), id_ in sorted((p, i) for i, p in spans.items() if p is not None):
        if device == last[0] and begin < last[1]:
            found[-1] += names[id_]
            last = device, max(end, last[1])
        else:
            found.append([*names[id_]])
            last = device, end
    return sorted(sorted(group) for group in found if len(group) > 1)
