"""Memory for copies of the state: taken once, touched once, used for every save.

A page that is written for the first time costs three to four times a copy into one that was: hence
one arena per run. Children that training forks do not get it (`MADV_DONTFORK`): DataLoader workers
would pay for every page that a save writes meanwhile.
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
"""What O_DIRECT asks of addresses, sizes and places in a file."""

_HUGE = 2 << 20


class Arena:
    """`size` bytes at the start of a page, in memory of this process alone.

    Raises:
        MemoryError: Where there is not so much.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self.size = size
        mapping = fresh_memory(max(size, 1) + _HUGE)
        _advise(mapping, "MADV_DONTFORK")
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        begin = -whole.data_ptr() % _HUGE
        self.bytes = whole[begin : begin + size]
        """uint8, shape [size]."""
        self.memory = memoryview(mapping)[begin : begin + size]
        """The same, for reading and writing files."""
        self.bytes.zero_()
        self._unpin = _pin(self.bytes) if is_pinned and size else None

    def close(self) -> None:
        """Unpin the memory; it goes back once no view of it is left."""
        if self._unpin is not None:
            self._unpin()


def fresh_memory(size: int) -> mmap.mmap:
    """Bytes that nothing else has, in huge pages where there are such: small ones cost more.

    Raises:
        MemoryError: Where there are not so many.
    """
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    _advise(mapping, "MADV_HUGEPAGE")
    return mapping


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask for huge pages for a tensor that nobody has written to; returns the tensor.

    Without, the first write to each small page takes longer than reading a file to it. A mapping
    of our own would not do: its storage cannot be resized.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
    if advice is not None and tensor.device.type == "cpu" and end - begin >= _HUGE:
        # It fails if the kernel has no huge pages: slower, and no worse.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    return tensor


def _advise(mapping: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is None:
        return
    with suppress(OSError):  # a kernel built without huge pages, say: slower, and no worse
        mapping.madvise(advice)


def _pin(memory: torch.Tensor) -> Callable[[], object] | None:
    """Let CUDA copy into this memory by itself; without, copies go through a small buffer."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, memory.numel(), 0))
    if code:
        messages.warn(
            f"{memory.numel()} bytes of memory could not be pinned for saves (CUDA error {code};"
            " see `ulimit -l`): copying the state takes longer."
        )
        return None
    return weakref.finalize(memory, runtime.cudaHostUnregister, address)
