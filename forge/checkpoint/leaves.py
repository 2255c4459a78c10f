"""The leaves of a state: by path, for people; and in what two states differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge.checkpoint import odd_tensors

_FEW = 8
"""Plain values that a list shows one by one."""

_LARGEST_DENSE = 1 << 28
"""Elements of a sparse tensor that is compared as a dense one."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Leaf:
    """One value that is no container, or many plain ones in a row."""

    path: str
    value: Any

    @property
    def kind(self) -> str:
        """Dtype and shape, or the value itself."""
        return _kind(self.value)

    @property
    def num_bytes(self) -> int:
        """Bytes of a tensor's or an array's content; 0 for all else."""
        if isinstance(self.value, torch.Tensor):
            parts = _parts(self.value)
            return sum(part.numel() * part.dtype.itemsize for part in parts)
        return int(getattr(self.value, "nbytes", 0)) if _is_array(self.value) else 0


def leaves(value: Any, path: str = "") -> Iterator[Leaf]:
    """Every leaf below `value`, in its order."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value and not _is_row(value):
        for i, one in enumerate(value):
            yield from leaves(one, f"{path}[{i}]")
    else:
        yield Leaf(path, value)


def _is_row(value: Any) -> bool:
    return len(value) > _FEW and all(isinstance(one, _PLAIN) for one in value)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f" {_short(value.layout)}"
        return f"{_short(value.dtype)}{list(value.shape)}{layout}"
    if _is_array(value) and value.shape:
        return f"{value.dtype}{list(value.shape)} numpy"
    if isinstance(value, (list, tuple)) and value:
        kinds = {type(one).__name__ for one in value}
        return f"{type(value).__name__} of {len(value)} {' and '.join(sorted(kinds))}"
    return f"{type(value).__name__} {value!r}" if value is not None else "None"


def _short(one: torch.dtype | torch.layout) -> str:
    return str(one).removeprefix("torch.")


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def total_bytes(found: list[Leaf]) -> int:
    """Bytes of all tensors and arrays, those that are tied once."""
    seen: set[tuple[int, str]] = set()
    total = 0
    for leaf in found:
        if isinstance(leaf.value, torch.Tensor):
            same = (_parts(leaf.value)[-1].data_ptr(), leaf.kind)
            total += leaf.num_bytes if same not in seen else 0
            seen.add(same)
        else:
            total += leaf.num_bytes
    return total


def differences(a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """(path, what differs) of each leaf that is not the same in both, bit by bit."""
    left = {leaf.path: leaf for leaf in leaves(a)}
    right = {leaf.path: leaf for leaf in leaves(b)}
    for path, one in left.items():
        if path not in right:
            yield path, f"only in A: {one.kind}"
        else:
            difference = _difference(one, right[path])
            if difference:
                yield path, difference
    for path, other in right.items():
        if path not in left:
            yield path, f"only in B: {other.kind}"


def _difference(a: Leaf, b: Leaf) -> str:
    are_tensors = isinstance(a.value, torch.Tensor) and isinstance(b.value, torch.Tensor)
    if are_tensors and a.kind == b.kind:
        return _value_difference(a.value, b.value)
    is_same = type(a.value) is type(b.value) and a.kind == b.kind
    if is_same and _is_array(a.value):
        return "" if a.value.tobytes() == b.value.tobytes() else "values differ"
    if is_same and repr(a.value) == repr(b.value):
        return ""
    return f"{a.kind} → {b.kind}" if a.kind != b.kind else "values differ"


def _value_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    parts = list(zip(_parts(a), _parts(b), strict=True))
    if all(one.shape == other.shape and _are_same_bits(one, other) for one, other in parts):
        return ""
    if a.layout is not torch.strided and a.numel() > _LARGEST_DENSE:
        return "values differ"
    a, b = (one if one.layout is torch.strided else one.to_dense() for one in (a, b))
    if a.dtype in odd_tensors.PACKED:
        return "values differ"
    x, y = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (a, b))
    # By 64 bits of a float two large integers can seem the same.
    is_equal = x == y if a.is_floating_point() or a.is_complex() else a == b
    is_equal |= x.isnan() & y.isnan()
    count = int((~is_equal).sum())
    if not count:
        return "values are equal, bits are not (a zero's sign, a NaN's payload, or their order)"
    largest = (x - y).abs()[~is_equal].max()
    shown = "nan" if bool(largest.isnan()) else f"{float(largest):g}"
    return f"values differ by at most {shown}, in {count} of {a.numel()}"


def _are_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel():
        return True
    raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*raw)
