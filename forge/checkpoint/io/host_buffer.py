"""A host buffer for copies of the state: allocated and touched once, reused by every save.

The first write to a page takes three to four times as long as later ones: hence one buffer per
run. Forked children do not inherit it (`MADV_DONTFORK`): otherwise each page that a save writes
would be copied for the DataLoader workers.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

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
        _advise(mapping, "MADV_HUGEPAGE")
        _advise(mapping, "MADV_DONTFORK")
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


def _advise(mapping: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    with suppress(OSError):  # for example a kernel without huge pages, which is only slower
        mapping.madvise(advice)


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
