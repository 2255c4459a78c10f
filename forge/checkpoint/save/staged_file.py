"""The content of the tensors' file that a save writes: copied whole, or chunk by chunk.

A `StagedFile` has the whole file in host memory: training continues once the copy is done. A
`StreamedFile` needs one buffer per thread: for saves that training waits for, and if memory is
short.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from forge.checkpoint.format.checksums import CHUNK
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.io.copying import copy_bytes, flat, num_threads
from forge.checkpoint.io.host_buffer import PAGE, HostBuffer
from forge.checkpoint.io.output import NUM_THREADS, Reader
from forge.compat import of_torch

_Tensors = dict[str, torch.Tensor]

_WORTH_A_THREAD = 16 << 20
"""From this many bytes on, a thread saves more time than starting it takes."""


def room_for(size: int) -> int:
    """Bytes of host memory for a file of `size` bytes: whole pages."""
    return -(-size // PAGE) * PAGE


def _buffer(size: int) -> HostBuffer:
    try:
        return HostBuffer(size)
    except MemoryError as error:  # a failed save, like one on a full disk
        text = f"not enough host memory for a copy of the state: {error}"
        raise OSError(errno.ENOMEM, text) from error


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class StagedFile:
    """The file in memory; filled again by every save of the same layout."""

    def __init__(self, layout: Layout, tensors: _Tensors, arena: HostBuffer) -> None:
        self.layout = layout
        self._arena = arena
        self._memory = arena.memory
        self._memory[: len(layout.head)] = layout.head
        self._views = {
            name: arena.bytes[slice(*layout.places[name])].view(tensor.dtype).view(tensor.shape)
            for name, tensor in tensors.items()
        }
        self._sources: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []

    def fill(self, tensors: _Tensors) -> None:
        """Copy the tensors; later changes to them are not in the file.

        On a GPU the copy runs on a separate CUDA stream: it waits for the current stream, the
        current stream's later work waits for the copy, and the host does not wait.
        """
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                by_device.setdefault(tensor.device, []).append(name)
        with torch.no_grad():
            for device, names in by_device.items():
                views = [self._views[name] for name in names]
                sources = [tensors[name].detach() for name in names]
                if device.type == "cuda":
                    self._copy_beside(device, views, sources)
                elif device.type == "cpu":
                    _copy(views, sources)
                else:
                    of_torch.foreach_copy(views, sources)

    def _copy_beside(
        self, device: torch.device, views: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> None:
        with torch.cuda.device(device):
            current, beside = torch.cuda.current_stream(), _stream()
            beside.wait_stream(current)
            with torch.cuda.stream(beside):
                of_torch.foreach_copy(views, sources, non_blocking=True)
                copied = beside.record_event()
            current.wait_event(copied)
        self._copied.append(copied)
        self._sources += sources  # keep their memory allocated until the copy is done

    @contextmanager
    def readers(self) -> Iterator[list[Reader]]:
        """One reader for each thread that writes."""
        self._wait()
        yield [self._chunk] * NUM_THREADS

    def tensors(self) -> _Tensors:
        """The copies, by name."""
        self._wait()
        return self._views

    def _wait(self) -> None:
        for copied in self._copied:
            copied.synchronize()
        self._copied, self._sources = [], []

    def _chunk(self, number: int) -> memoryview:
        return self._memory[number * CHUNK : (number + 1) * CHUNK]


class StreamedFile:
    """The file, copied chunk by chunk; the tensors must not change until it is written."""

    def __init__(self, layout: Layout, tensors: _Tensors, spare: list[HostBuffer]) -> None:
        self.layout = layout
        self._tensors = tensors
        self._spare = spare
        self._names = list(layout.places)
        self._ends = [end for _, end in layout.places.values()]
        self._plain: tuple[str, torch.Tensor] = "", torch.empty(0, device="cpu")
        self._lock = threading.Lock()

    @contextmanager
    def readers(self) -> Iterator[list[Reader]]:
        """One reader for each thread that writes, with its own buffer."""
        size = min(CHUNK, room_for(self.layout.size))
        buffers: list[HostBuffer] = []
        while len(buffers) < NUM_THREADS:
            try:  # `pop` is atomic: two saves never share a buffer
                buffer = self._spare.pop()
            except IndexError:
                buffer = _buffer(size)
            if buffer.size >= size:
                buffers.append(buffer)
        yield [self._reader(buffer) for buffer in buffers]
        self._spare += buffers

    def tensors(self) -> _Tensors:
        """The tensors themselves, by name."""
        return self._tensors

    def _reader(self, buffer: HostBuffer) -> Reader:
        def read(number: int) -> memoryview:
            self._copy(number * CHUNK, buffer.bytes[:CHUNK])
            return buffer.memory[:CHUNK]

        return read

    def _copy(self, begin: int, buffer: torch.Tensor) -> None:
        end = min(begin + len(buffer), self.layout.size)
        head = self.layout.head[begin:end]
        if head:
            ctypes.memmove(buffer.data_ptr(), head, len(head))
        first = bisect.bisect_right(self._ends, begin)
        for name in self._names[first:]:
            start, stop = self.layout.places[name]
            if start >= end:
                return
            low, high = max(begin, start), min(end, stop)
            if low < high:
                source = self._flat(name)[low - start : high - start]
                copy_bytes(buffer[low - begin : high - begin], source)

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


def _copy(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy on the CPU, in as many threads as torch has, and at least two if there are two cores.

    One core cannot use the whole memory bandwidth, and torch's own threads synchronize after
    every tensor.
    """
    own = torch.get_num_threads()
    count = min(max(own, 2), num_threads())
    if own > count or count == 1 or sum(view.nbytes for view in views) < _WORTH_A_THREAD:
        of_torch.foreach_copy(views, sources)
        return
    moves: list[_Move] = []
    for view, source in zip(views, sources, strict=True):
        if source.is_contiguous() and not source.is_conj() and not source.is_neg():
            to, at, size = view.data_ptr(), source.data_ptr(), view.nbytes
            moves += [(min(CHUNK, size - i), to + i, at + i) for i in range(0, size, CHUNK)]
        else:
            view.copy_(source)
    moves.sort(reverse=True)  # by size, so that all threads copy about as many bytes
    with ThreadPoolExecutor(count, "forge-copy") as pool:
        list(pool.map(_move_all, [moves[first::count] for first in range(count)]))


_Move = tuple[int, int, int]
"""(number of bytes, destination address, source address)."""


def _move_all(moves: list[_Move]) -> None:
    for size, to, at in moves:
        ctypes.memmove(to, at, size)
