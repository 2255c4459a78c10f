"""Parameters and buffers that are expanded: many elements in the memory of one.

torch saves them and refuses to copy anything into them: what was saved could not be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from forge.checkpoint.format.tensor_encoding import are_same_bits


@contextmanager
def set_aside(one: Any) -> Iterator[None]:
    """Within, copies that can be written to stand for the expanded tensors of a module.

    Afterwards these are back, with what was loaded: one that is a view of another tensor of the
    module has that already, and stays its view.
    """
    copies: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in one.modules() if isinstance(one, torch.nn.Module) else ():
        kinds: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for tensors in kinds:
            for name, live in tensors.items():
                if live is not None and is_expanded(live):
                    places.append((tensors, name, live))
                    tensors[name] = copies.setdefault(id(live), _copy(live))
    try:
        yield
    finally:
        for tensors, name, live in places:
            tensors[name] = live
            loaded = copies[id(live)].detach()
            if not are_same_bits(live.detach(), loaded):
                live.data = _expanded_as(loaded, live.stride())


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, in the way that torch refuses to write to."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _copy(live: torch.Tensor) -> torch.Tensor:
    copy = live.detach().clone(memory_format=torch.contiguous_format)
    is_parameter = isinstance(live, torch.nn.Parameter)
    return torch.nn.Parameter(copy, live.requires_grad) if is_parameter else copy


def _expanded_as(loaded: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The same values in as little memory as these strides ask for, if that is possible."""
    first = loaded[tuple(slice(None) if step else slice(0, 1) for step in stride)]
    expanded = first.clone().expand(loaded.shape)
    return expanded if are_same_bits(expanded, loaded) else loaded
