"""The leaves of a state with readable paths, and the differences between two states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge.checkpoint.format.encoding import Encoder
from forge.checkpoint.format.tensor_encoding import strided

_FEW = 8
"""A list of up to this many plain values is shown value by value."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Leaf:
    """A value that is not a container, or a long list of plain values."""

    path: str
    value: Any

    @property
    def kind(self) -> str:
        """Dtype and shape, or the value itself."""
        return _kind(self.value)

    @property
    def num_bytes(self) -> int:
        """Bytes of a tensor or an array; 0 for other values."""
        if isinstance(self.value, torch.Tensor):
            return sum(one.numel() * one.dtype.itemsize for one in strided(self.value))
        return int(getattr(self.value, "nbytes", 0)) if _is_array(self.value) else 0


def leaves(value: Any, path: str = "") -> Iterator[Leaf]:
    """Every leaf in `value`, in order."""
    items = _items_of(value)
    for suffix, one in (items or {}).values():
        yield from leaves(one, path + suffix if path else suffix.removeprefix("."))
    if not items:
        yield Leaf(path, value)


def _items_of(value: Any) -> dict[Any, tuple[str, Any]] | None:
    """The items of a container: comparable key -> (path, value).

    None if the value is not a container, or is a long list of plain values.
    """
    if isinstance(value, Mapping):
        return {json.dumps(Encoder().encode(key)): (f".{key}", one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not _is_row(value):
        return {i: (f"[{i}]", one) for i, one in enumerate(value)}
    return None


def _is_row(value: Any) -> bool:
    return len(value) > _FEW and all(isinstance(one, _PLAIN) for one in value)


def _identity(value: Any) -> Any:
    """Equal for two values exactly if both are saved as the same bytes: 1 is not True."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(value))
    return text, [bytes(one.numpy()) for one in encoder.tensors.values()]


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f" {_short(value.layout)}"
        return f"{_short(value.dtype)}{list(value.shape)}{layout}"
    if _is_array(value) and value.shape:
        return f"{value.dtype}{list(value.shape)} numpy"
    if isinstance(value, Mapping) and value:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (list, tuple)) and value:
        kinds = {type(one).__name__ for one in value}
        return f"{type(value).__name__} of {len(value)} {' and '.join(sorted(kinds))}"
    return f"{type(value).__name__} {value!r}" if value is not None else "None"


def _short(one: torch.dtype | torch.layout) -> str:
    return str(one).removeprefix("torch.")


def differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, what differs) for each leaf that is not bitwise the same in both."""
    left, right = _items_of(a), _items_of(b)
    if left is None or right is None or not (left or right):
        difference = _difference(a, b)
        if difference:
            yield path, difference
        return
    if type(a) is not type(b):
        yield path, f"{type(a).__name__} → {type(b).__name__}"
    for key in [*left, *(key for key in right if key not in left)]:
        suffix, one = left[key] if key in left else right[key]
        below = path + suffix if path else suffix.removeprefix(".")
        if key in left and key in right:
            yield from differences(one, right[key][1], below)
        else:
            where = "A" if key in left else "B"
            yield from ((leaf.path, f"only in {where}: {leaf.kind}") for leaf in leaves(one, below))


def _difference(a: Any, b: Any) -> str:
    is_tensor = isinstance(a, torch.Tensor)
    kinds = _kind(a), _kind(b)
    if is_tensor and kinds[0] == kinds[1]:
        return _value_difference(a, b)
    if not is_tensor and _identity(a) == _identity(b):  # first: equal sets can print differently
        return ""
    return f"{kinds[0]} → {kinds[1]}" if kinds[0] != kinds[1] else "values differ"


def _value_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if all(
        one.shape == other.shape and _are_same_bits(one, other)
        for one, other in zip(strided(a), strided(b), strict=True)
    ):
        return ""
    if a.layout is not torch.strided:
        return "values differ"
    x, y = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (a, b))
    # As float64, two different large integers can be equal.
    is_equal = x == y if a.is_floating_point() or a.is_complex() else a == b
    is_equal |= x.isnan() & y.isnan()
    count = int((~is_equal).sum())
    if not count:
        return "equal values, different bits (sign of a zero, or NaN payload)"
    largest = (x - y).abs()[~is_equal].max()
    shown = "nan" if bool(largest.isnan()) else f"{float(largest):g}"
    return f"{count} of {a.numel()} differ, largest difference {shown}"


def _are_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors of the same shape, dtype and device are bitwise equal."""
    if not a.numel():
        return True
    raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*raw)
