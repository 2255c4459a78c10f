"""Tensors as plain bytes in host memory, for reading and writing files."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
import xxhash

PAGE = 4096
"""O_DIRECT needs addresses, sizes and file offsets that are multiples of this."""

HUGE = 2 << 20
"""Bytes of a huge page."""


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that was never written to; returns the tensor.

    Without them, the first write to each small page takes longer than reading the file into it.
    A tensor over a mapping of our own would not work: its storage cannot be resized.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
    if advice is not None and tensor.device.type == "cpu" and end - begin >= HUGE:
        # This fails if the kernel has no huge pages, which only makes loading slower.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    return tensor


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
