"""Warns of changing buffers that no state_dict contains (`persistent=False`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format import tensor_encoding
from forge.compat import of_torch

_SMALL = 1 << 16
"""Largest buffer that is compared, in bytes; larger ones are mostly caches."""

_SHOWN = 8
"""Number of names that one message lists."""


class TransientBuffers:
    """Compares such buffers of modules, at each `check`, with their values at the first check."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._first: dict[str, torch.Tensor] | None = None

    def check(self) -> None:
        """Warn, once, of changed buffers; a buffer with another shape counts as a cache."""
        if self._first is None:
            self._first = {name: buffer.clone() for name, buffer in self._buffers()}
        if not self._first:
            return
        found = [
            name
            for name, now in self._buffers()
            if name in self._first and _has_changed(self._first[name], now)
        ]
        if not found:
            return
        self._first = {}
        messages.warn(
            "Buffers have changed since the run began, but are not saved (`persistent=False`):"
            f" {messages.truncate_list(found, _SHOWN)}. A resumed job starts with the values that"
            " the script sets. If results depend on these buffers, register them with"
            " `persistent=True`."
        )

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self._objects.items():
            if not isinstance(one, torch.nn.Module):
                continue
            for prefix, module in one.named_modules(prefix=name):
                for key, buffer in sorted(of_torch.non_persistent_buffers(module).items()):
                    if _is_looked_at(buffer):
                        yield f"{prefix}.{key}", buffer.detach()


def _is_looked_at(buffer: torch.Tensor) -> bool:
    is_plain = tensor_encoding.problem(buffer) is None and buffer.layout is torch.strided
    return is_plain and buffer.numel() * buffer.dtype.itemsize <= _SMALL


def _has_changed(first: torch.Tensor, now: torch.Tensor) -> bool:
    if (first.shape, first.dtype, first.device) != (now.shape, now.dtype, now.device):
        return False
    return not tensor_encoding.are_same_bits(first, now)
