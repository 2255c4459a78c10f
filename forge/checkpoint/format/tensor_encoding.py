"""Tensors and NumPy arrays as plain bytes: which can be saved exactly, and what they consist of.

A sparse tensor consists of strided ones, a NumPy scalar or array of a description and bytes. NumPy
is imported only if the program has imported it already or a checkpoint has NumPy values.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
import xxhash

from forge.checkpoint.format.tensorfile import WRITTEN
from forge.compat import of_torch

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Other subclasses have behaviour that is not in their data."""

_KINDS = "biufcmMSU"
"""Kinds of dtype that are plain bytes: numbers, times, strings of fixed length."""


def is_plain(value: Any) -> bool:
    """Whether it is a strided tensor without behaviour of its own."""
    return type(value) in PLAIN_TYPES and value.layout is torch.strided and not value.is_nested


def problem(tensor: torch.Tensor) -> str | None:
    """Describes a tensor that cannot be saved exactly; None if it can."""
    if type(tensor) not in PLAIN_TYPES:
        return f"a tensor of the subclass {type(tensor).__qualname__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a tensor without data (device meta)"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"a tensor of the layout {tensor.layout} (let state_dict() return .to_sparse_coo())"
    if tensor.layout is not torch.strided and (tensor.is_conj() or tensor.is_neg()):
        return "a sparse tensor that is a conjugate or negative view"
    if tensor.dtype not in WRITTEN:
        return f"a tensor of {tensor.dtype} (let state_dict() return .view(torch.uint8) of it)"
    return None


def is_here(device: torch.device) -> bool:
    """Whether this process can create tensors and generators on the device."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or module is None or not getattr(module, "is_available", bool)():
        return device.type == "cpu"
    return (device.index or 0) < int(module.device_count())


def describe_sparse(tensor: torch.Tensor) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """A sparse tensor as [size, whether coalesced], and its strided tensors by name."""
    named = dict(zip(("indices", "values"), of_torch.coo_parts(tensor), strict=True))
    return [list(tensor.shape), tensor.is_coalesced()], named


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors with the data: the tensor itself, or those of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    return list(describe_sparse(tensor.detach())[1].values())


def describe_array(value: Any) -> tuple[str, list[Any], bytes] | None:
    """(tag, description, content) of a scalar or an array; None if it cannot be saved exactly."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    dtype = value.dtype
    if dtype.kind not in _KINDS:
        return None
    if type(value) is dtype.type:
        return "!numpy_scalar", [dtype.str], value.tobytes()
    if type(value) is numpy.ndarray and dtype.itemsize:
        by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
        notes = ["F"] * by_columns + ["read-only"] * (not value.flags.writeable)
        content = value.tobytes("F" if by_columns else "C")
        return "!ndarray", [dtype.str, list(value.shape), *notes], content
    return None


PAGE = 4096
"""O_DIRECT needs addresses, sizes and file offsets that are multiples of this."""

HUGE = 2 << 20
"""Bytes of a huge page."""


def num_threads() -> int:
    """Number of threads that read or copy: one per available core, at most 4 (disk bandwidth)."""
    if hasattr(os, "sched_getaffinity"):
        return min(4, len(os.sched_getaffinity(0)))
    return min(4, os.cpu_count() or 1)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: uint8, shape [bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor, begin: int, count: int) -> memoryview:
    """Bytes of a uint8 tensor on the CPU, to read a file into; keep the tensor alive meanwhile."""
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr() + begin)).cast("B")


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous uint8 tensors; one of them can be on another device."""
    if target.device.type == source.device.type == "cpu":
        # Not copy_: it would start OpenMP threads for each thread that calls it.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))
    else:
        target.copy_(source)


def digest(tensor: torch.Tensor) -> str:
    """XXH3 (128 bits) of values, dtype and shape, by which ranks find out what they share.

    It is as fast as reading memory; a cryptographic hash would be slower than the disk.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found = xxhash.xxh3_128(f"{plain.dtype}{list(plain.shape)}".encode())
    if plain.numel():
        found.update(bytes_of(flat(plain), 0, plain.nbytes))
    return found.hexdigest()
