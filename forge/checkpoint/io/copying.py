"""Bytes copied from one tensor to another, by threads of our own."""

from __future__ import annotations

import ctypes
import os

import torch


def num_threads() -> int:
    """Threads that read or copy: one for each of our cores, but no more than a disk can feed."""
    if hasattr(os, "sched_getaffinity"):
        return min(4, len(os.sched_getaffinity(0)))
    return min(4, os.cpu_count() or 1)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: uint8, shape [bytes]."""
    return tensor.detach().view(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor, begin: int, count: int) -> memoryview:
    """Bytes of a tensor of uint8 on the CPU, for reading a file to; the tensor outlives them."""
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr() + begin)).cast("B")


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between contiguous tensors of uint8, of which one may be on another device."""
    if target.device.type == source.device.type == "cpu":
        # Not copy_: each thread that calls it gets threads of OpenMP of its own.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))
    else:
        target.copy_(source)
