"""Tensors that the file has no name for: sparse ones, and dtypes that safetensors lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forge.checkpoint.format.tensorfile import WRITTEN

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Others, subclasses, have behaviour that their data does not tell."""

_CARRIER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CARRIED = {
    getattr(torch, name): _CARRIER_OF_SIZE[size]
    for name, size in {
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,  # these two not in every torch
        "float4_e2m1fn_x2": 1,
        "complex32": 4,
    }.items()
    if hasattr(torch, name)
}
"""Dtype -> the one of the same size as which its bits are written."""

PACKED = {getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)}
"""Dtypes of two values in a byte, which torch cannot convert."""

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def problem(tensor: torch.Tensor) -> str | None:
    """What a tensor is that cannot be kept exactly, or None."""
    if type(tensor) in PLAIN_TYPES and _is_usual(tensor):
        return None  # nearly all of them, and asked at every save
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter that a lazy module has not made yet (call the module once)"
    if type(tensor) not in PLAIN_TYPES:
        return f"a tensor of the subclass {type(tensor).__qualname__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a tensor without data (device meta)"
    if tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        return f"a tensor of the layout {tensor.layout}"
    if tensor.layout is not torch.strided and (tensor.is_conj() or tensor.is_neg()):
        return "a sparse tensor that is a conjugate or negative view"
    if tensor.dtype not in WRITTEN and tensor.dtype not in _CARRIED:
        return f"a tensor of {tensor.dtype}"
    return None


def _is_usual(tensor: torch.Tensor) -> bool:
    is_odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout is torch.strided and tensor.dtype in WRITTEN and not is_odd


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bits in a dtype that the file has."""
    carrier = _CARRIED.get(tensor.dtype)
    return tensor if carrier is None else tensor.resolve_conj().view(carrier)


def uncarried(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Back to the dtype of this name.

    Raises:
        ValueError: Where it is none of those that are carried as `tensor` is.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype) or _CARRIED.get(dtype) is not tensor.dtype:
        raise ValueError(f"{name} is not kept as {tensor.dtype}, or not known to this torch")
    return tensor.view(dtype)


def in_order(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy whose elements lie in memory as these strides say."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return torch.empty_strided(shape, tuple(stride), dtype=dtype, device=device).copy_(tensor)


def sparse_parts(tensor: torch.Tensor) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What makes up a sparse tensor: (layout, size, whether coalesced), and its parts by name."""
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        return [layout, list(tensor.shape), tensor.is_coalesced()], parts
    parts = {name: getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]}
    return [layout, list(tensor.shape), False], {**parts, "values": tensor.values()}


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What has memory of its own: the tensor, or the parts of a sparse one, its values last."""
    if tensor.layout is torch.strided:
        return [tensor]
    return list(sparse_parts(tensor.detach())[1].values())


def are_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors of one shape, dtype and device hold the same, NaNs included."""
    if not a.numel():
        return True
    raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return torch.equal(*raw)


def sparse(described: list[Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sparse tensor of these parts, its indices checked to lie within its size."""
    name, size, is_coalesced = described
    layout = vars(torch).get(name)
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            size,
            device=parts["values"].device,
            is_coalesced=is_coalesced,
            check_invariants=True,
        )
    if layout not in _COMPRESSED:
        raise ValueError(f"no layout {name}")
    compressed, plain = (parts[part] for part in _COMPRESSED[layout])
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        parts["values"],
        size,
        layout=layout,
        device=parts["values"].device,
        check_invariants=True,
    )
