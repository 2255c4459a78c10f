"""Host memory: a buffer for copies of the state, and tensors as plain bytes.

The first write to a page takes three to four times as long as later ones: hence one buffer per
run, reused by every save. Forked children do not inherit it (`MADV_DONTFORK`): otherwise each page
that a save writes would be copied for the DataLoader workers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
import xxhash

from forge import messages

PAGE = 4096
"""O_DIRECT needs addresses, sizes and file offsets that are multiples of this."""

_HUGE = 2 << 20


class HostBuffer:
    """`size` bytes of page-aligned private memory.

    Raises:
        MemoryError: If there is not enough memory.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self.size = size
        num_bytes = max(size, 1) + _HUGE
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{num_bytes} bytes: {error}") from error
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, name):
                with suppress(OSError):  # for example a kernel without huge pages, only slower
                    mapping.madvise(getattr(mmap, name))
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        begin = -whole.data_ptr() % _HUGE
        self.bytes = whole[begin : begin + size]
        """uint8, shape [size]."""
        self.memory = memoryview(mapping)[begin : begin + size]
        """The same memory, for reading and writing files."""
        self.bytes.zero_()
        self._unpin = _pin(self.bytes) if is_pinned and size else None

    def close(self) -> None:
        """Unpin the memory; it is freed once no view of it is left."""
        if self._unpin is not None:
            self._unpin()


def _pin(memory: torch.Tensor) -> Callable[[], object] | None:
    """Pin the memory, so that CUDA copies into it directly instead of through a small buffer."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.numel(), 0))
    if code:
        messages.warn(
            f"Could not pin {memory.numel()} bytes of host memory for saves (CUDA error {code};"
            " check `ulimit -l`): copying the state from the GPU takes longer."
        )
        return None
    return weakref.finalize(memory, runtime.cudaHostUnregister, address)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that was never written to; returns the tensor.

    Without them, the first write to each small page takes longer than reading the file into it.
    A tensor over a mapping of our own would not work: its storage cannot be resized.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
    if advice is not None and tensor.device.type == "cpu" and end - begin >= _HUGE:
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
