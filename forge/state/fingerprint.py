"""What modules look like at a moment: enough to tell later whether anything that they save changed.

    a parameter, a buffer       the very object, where its memory lies, its version counter
    writes through `.data`      do not count; its first elements tell them
    what else a module saves    (`get_extra_state`, a `state_dict` of its own) by value

Where that is not known there is no look, which is as good as a change.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forge.checkpoint.format import tensor_encoding
from forge.checkpoint.format.codec import Encoder

_SAMPLED = 8
"""Elements of each tensor that are compared."""

_WAYS_TO_SAVE = ("state_dict", "get_extra_state", "_save_to_state_dict")


@dataclass(frozen=True)
class Look:
    """What modules looked like once."""

    tensors: list[torch.Tensor]
    """Held, so that none that takes a place later can take its memory, too."""
    versions: list[int]
    addresses: list[int]
    samples: list[torch.Tensor]
    """One for each device, on which it stays."""
    more: Any
    """What is saved besides; equal to no other's where nobody asked."""

    def is_same(self, other: Look) -> bool:
        """Whether nothing has changed between the two."""
        return (
            len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
            and self.versions == other.versions
            and self.addresses == other.addresses
            and _are_equal(self.samples, other.samples)
            and self.more == other.more
        )


class Looks:
    """Looks at modules, again and again.

    Args:
        others: Parameters that none of the modules holds.
    """

    def __init__(self, modules: list[torch.nn.Module], others: Iterable[torch.Tensor] = ()) -> None:
        self._modules = modules
        self._others = list(others)
        self._addresses: list[int] = []
        self._samples: list[list[torch.Tensor]] = []

    def look(self, is_thorough: bool) -> Look:
        """What they look like now.

        Args:
            is_thorough: Whether to ask for what modules save in ways of their own, which may take
                long; without it a look at such modules is like no other.
        Raises:
            Exception: Of any kind, for what cannot be looked at.
        """
        modules = list(every(self._modules))
        tensors = [t for one in modules for t in tensors_of(one)] + self._others
        addresses = [a for tensor in tensors for a in _addresses(tensor)]
        if addresses != self._addresses or not self._samples:
            self._samples = _sample(tensors)
            self._addresses = addresses
        more: Any = [one for one in modules if saves_more(one)]
        if more:
            more = _More(more, addresses) if is_thorough else object()
        return Look(
            tensors,
            [tensor._version for tensor in tensors],
            addresses,
            [torch.cat(some) for some in self._samples],
            more,
        )


class _More:
    """What modules save in ways of their own, besides the tensors at the known addresses."""

    def __init__(self, modules: list[torch.nn.Module], known: Iterable[int]) -> None:
        addresses = set(known)
        encoder = Encoder()
        self._tree = [
            encoder.encode({k: v for k, v in one.state_dict().items() if not _is_at(v, addresses)})
            for one in modules
        ]
        self._bits = [
            one.detach().contiguous().view(-1).view(torch.uint8).clone()
            for one in encoder.tensors.values()
        ]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _More)
            and self._tree == other._tree
            and _are_equal(self._bits, other._bits)
        )

    __hash__ = None  # type: ignore[assignment]


def every(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules and all below them, each once; quicker than `Module.modules`."""
    seen: set[int] = set()
    todo = list(modules)
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            todo += one._modules.values()  # type: ignore[arg-type]
            yield one


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The module's own parameters and buffers, not those of modules below it."""
    found = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in found if tensor is not None]


def saves_more(module: torch.nn.Module) -> bool:
    """Whether a module's `state_dict` may hold other things than its parameters and buffers."""
    kind: Any = type(module)
    return bool(
        _has_own_way(kind)
        or module._state_dict_hooks
        or module._state_dict_pre_hooks
        or "state_dict" in vars(module)
    )


@functools.cache
def _has_own_way(kind: Hashable) -> bool:
    return any(getattr(kind, way) is not getattr(torch.nn.Module, way) for way in _WAYS_TO_SAVE)


def _addresses(tensor: torch.Tensor) -> list[int]:
    return [part.data_ptr() for part in tensor_encoding.parts(tensor)]


def _sample(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The first bytes of each tensor, in its own memory, by device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for part in (part for tensor in tensors for part in tensor_encoding.parts(tensor)):
        size, memory = part.element_size(), part.untyped_storage()
        begin = part.storage_offset() * size
        count = min(_SAMPLED * size, memory.nbytes() - begin) if part.numel() else 0
        raw = torch.empty(0, dtype=torch.uint8, device=part.device)
        found.setdefault(part.device, []).append(raw.set_(memory, begin, (count,), (1,)))
    return list(found.values())


def _is_at(value: Any, addresses: set[int]) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_plain and value.numel() > 0 and value.data_ptr() in addresses


def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
