"""The tensors' file of a save: copied to host memory as a whole, or chunk by chunk.

With the whole file in a buffer, training continues once the copy is done. Without it, each chunk
is copied when it is written: for saves that training waits for, and if memory is short.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import torch

from forge.checkpoint.format.checksums import CHUNK
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.host_memory import PAGE, HostBuffer, copy_bytes, flat, num_threads
from forge.compat import of_torch

NUM_WRITERS = 2
"""Threads: one computes the checksum of a chunk while the other writes."""

Tensors = dict[str, torch.Tensor]

Reader = Callable[[int], memoryview]
"""Number of a chunk -> its bytes, page-aligned; valid until the thread's next call."""

_WORTH_A_THREAD = 16 << 20
"""From this many bytes on, a thread saves more time than starting it takes."""


def room_for(size: int) -> int:
    """Bytes of host memory for a file of `size` bytes: whole pages."""
    return -(-size // PAGE) * PAGE


def views_of(buffer: HostBuffer, layout: Layout, tensors: Tensors) -> Tensors:
    """Write the file's header into a buffer; return a tensor for each tensor of the file."""
    buffer.memory[: len(layout.head)] = layout.head
    return {
        name: buffer.bytes[slice(*layout.spans[name])].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }


class StagedFile:
    """The file of these tensors, which must not change until it is written, or copied.

    Args:
        layout: The positions of the tensors in the file.
        tensors: By name.
        rooms: Buffers for chunks, if an earlier file has left some.
    """

    def __init__(
        self, layout: Layout, tensors: Tensors, rooms: list[HostBuffer] | None = None
    ) -> None:
        self.layout = layout
        self.is_spent = False
        """Whether the copy is on disk, so that the next one can reuse its memory."""
        self._tensors = tensors
        self._rooms = [] if rooms is None else rooms
        self._image: memoryview | None = None
        self._copying: list[tuple[torch.cuda.Event, list[torch.Tensor]]] = []
        """Copies from GPUs in progress, and their sources, which must stay allocated."""
        self._plain: tuple[str, torch.Tensor] = "", torch.empty(0, device="cpu")
        self._lock = threading.Lock()

    @property
    def is_copy(self) -> bool:
        """Whether the tensors were copied, so that training can change them."""
        return self._image is not None

    def copy_to(self, buffer: HostBuffer, views: Tensors) -> None:
        """Copy the tensors to `views` of the buffer; later changes to them are not in the file.

        On a GPU the copy runs on a separate CUDA stream: it waits for the current stream, the
        current stream's later work waits for the copy, and the host does not wait.
        """
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in self._tensors.items():
            if tensor.numel():
                by_device.setdefault(tensor.device, []).append(name)
        with torch.no_grad():
            for device, names in by_device.items():
                targets = [views[name] for name in names]
                sources = [self._tensors[name] for name in names]
                if device.type == "cuda":
                    self._copying.append((_copy_in_stream(device, targets, sources), sources))
                elif device.type == "cpu":
                    _copy_in_threads(targets, sources)
                else:
                    of_torch.foreach_copy(targets, sources)
        self._tensors, self._image = views, buffer.memory

    def tensors(self) -> Tensors:
        """The tensors, or their copies once these are complete."""
        for copied, _ in self._copying:
            copied.synchronize()
        self._copying = []
        return self._tensors

    def without(self, names: Collection[str]) -> StagedFile:
        """The file without the tensors of these names."""
        kept = {name: one for name, one in self.tensors().items() if name not in names}
        return StagedFile(Layout(kept), kept)

    def release(self) -> None:
        """The file is on disk: the memory of a copy can be reused."""
        self.is_spent = self.is_copy

    def readers(self) -> list[Reader]:
        """One reader for each thread that writes; only one save at a time can have them."""
        self.tensors()
        if self._image is not None:
            return [self._slice] * NUM_WRITERS
        size = min(CHUNK, room_for(self.layout.size))
        if not self._rooms or self._rooms[0].size < size:
            self._rooms[:] = [_chunk_buffer(size) for _ in range(NUM_WRITERS)]
        return [functools.partial(self._assembled, room) for room in self._rooms]

    def _slice(self, number: int) -> memoryview:
        assert self._image is not None
        return self._image[number * CHUNK : (number + 1) * CHUNK]

    def _assembled(self, room: HostBuffer, number: int) -> memoryview:
        begin = number * CHUNK
        end = min(begin + CHUNK, self.layout.size)
        head = self.layout.head[begin:end]
        room.memory[: len(head)] = head
        for name in self._names[bisect.bisect_right(self._ends, begin) :]:
            start, stop = self.layout.spans[name]
            if start >= end:
                break
            low, high = max(begin, start), min(end, stop)
            if low < high:
                source = self._flat(name)[low - start : high - start]
                copy_bytes(room.bytes[low - begin : high - begin], source)
        return room.memory[:CHUNK]

    @functools.cached_property
    def _names(self) -> list[str]:
        return list(self.layout.spans)

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [stop for _, stop in self.layout.spans.values()]

    def _flat(self, name: str) -> torch.Tensor:
        """A tensor as uint8, shape [bytes]."""
        tensor = self._tensors[name]
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            with self._lock:  # each chunk of a large tensor calls this: convert it only once
                if self._plain[0] != name:
                    plain = tensor.resolve_conj().resolve_neg().contiguous()
                    self._plain = name, plain
                tensor = self._plain[1]
        return flat(tensor)


def _chunk_buffer(size: int) -> HostBuffer:
    try:
        return HostBuffer(size)
    except MemoryError as error:  # a failed save, like one on a full disk
        text = f"not enough host memory for a copy of the state: {error}"
        raise OSError(errno.ENOMEM, text) from error


def _copy_in_stream(
    device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> torch.cuda.Event:
    with torch.cuda.device(device):
        current, beside = torch.cuda.current_stream(), _stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            of_torch.foreach_copy(targets, sources, non_blocking=True)
            copied: torch.cuda.Event = beside.record_event()
        current.wait_event(copied)
    return copied


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _copy_in_threads(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy on the CPU, in as many threads as torch has, and at least two if there are two cores.

    One core cannot use the whole memory bandwidth, and torch's own threads synchronize after
    every tensor.
    """
    own = torch.get_num_threads()
    count = min(max(own, 2), num_threads())
    if own > count or count == 1 or sum(target.nbytes for target in targets) < _WORTH_A_THREAD:
        of_torch.foreach_copy(targets, sources)
        return
    moves: list[_Move] = []
    for target, source in zip(targets, sources, strict=True):
        if source.is_contiguous() and not source.is_conj() and not source.is_neg():
            to, at, size = target.data_ptr(), source.data_ptr(), target.nbytes
            moves += [(min(CHUNK, size - i), to + i, at + i) for i in range(0, size, CHUNK)]
        else:
            target.copy_(source)
    moves.sort(reverse=True)  # by size, so that all threads copy about as many bytes
    with ThreadPoolExecutor(count, "forge-copy") as pool:
        list(pool.map(_move_all, [moves[first::count] for first in range(count)]))


_Move = tuple[int, int, int]
"""(number of bytes, destination address, source address)."""


def _move_all(moves: list[_Move]) -> None:
    for size, to, at in moves:
        ctypes.memmove(to, at, size)
