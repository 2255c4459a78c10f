"""Staging: a state that is to be saved, and the file of its tensors, copied or not.

A copy has the whole file in a host buffer, which all saves reuse: training continues once the copy
is done. Without a copy, each chunk is assembled when it is written: for saves that training waits
for, and if memory is short.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format.manifest import CHUNK, FINAL, Origin, num_chunks
from forge.checkpoint.format.tensor_encoding import (
    HUGE,
    PAGE,
    copy_bytes,
    digest,
    flat,
    num_threads,
)
from forge.checkpoint.format.tensorfile import Layout
from forge.compat import of_torch

RESERVE = 256 << 20
"""Bytes of host memory that a copy must leave free."""

NUM_WRITERS = 2
"""Threads: one computes the checksum of a chunk while the other writes."""

Tensors = dict[str, torch.Tensor]

Reader = Callable[[int], memoryview]
"""Number of a chunk -> its bytes, page-aligned; valid until the thread's next call."""

_WORTH_A_THREAD = 16 << 20
"""From this many bytes on, a thread saves more time than starting it takes."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state that is to be written to disk."""

    step: int
    tree: Any
    """The state as JSON, with references to tensors."""
    file: StagedFile
    """The file of its tensors."""
    unshared: Collection[str]
    """Names of sharded tensors: each rank has a different part, so ranks do not compare them."""
    origin: Origin
    is_final: bool = False
    """Whether it is the state after the code that follows the last loop (`final_step_<N>`)."""
    replaces: bool = True
    """Write it even if a good checkpoint of its step exists."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory."""
        return f"{FINAL if self.is_final else ''}step_{self.step}"

    @property
    def is_independent(self) -> bool:
        """Whether it is a copy, so that training can change the state before it is written."""
        return self.file.is_copy

    @property
    def num_bytes(self) -> int:
        """Size of the tensors' file."""
        return self.file.layout.size

    def digests(self) -> dict[str, str]:
        """Name -> digest of each tensor that can be equal on several ranks."""
        tensors = self.file.tensors().items()
        return {name: digest(tensor) for name, tensor in tensors if name not in self.unshared}


class StagingPool:
    """Stages the tensors of each save, in memory that the saves after it reuse."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._described: list[Any] = []
        self._buffer: HostBuffer | None = None
        self._views: Tensors | None = None
        """Tensors in the buffer, for the current layout."""
        self._last: weakref.ref[StagedFile] | None = None
        self._has_warned = False

    def stage(self, tensors: Tensors, *, copy: bool) -> StagedFile:
        """The file of these tensors; with `copy`, training can change them (if memory allows)."""
        layout = self._layout_of(tensors)
        file = StagedFile(layout, tensors)
        buffer = self._buffer_for(layout, tensors) if copy else None
        if buffer is not None:
            if self._views is None:
                self._views = views_of(buffer, layout, tensors)
            file.copy_to(buffer, self._views)
            self._last = weakref.ref(file)
        return file

    def close(self) -> None:
        """Free the memory as soon as no save reads from it."""
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = self._views = None

    def _layout_of(self, tensors: Tensors) -> Layout:
        described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        if self._layout is None or described != self._described:
            self._layout, self._described, self._views = Layout(tensors), described, None
        return self._layout

    def _buffer_for(self, layout: Layout, tensors: Tensors) -> HostBuffer | None:
        last = self._last() if self._last is not None else None
        if last is not None and not last.is_spent:
            self._buffer = self._views = None  # the last copy is not written yet: it keeps them
        room = room_for(layout.size)
        if self._buffer is None or self._buffer.size < room:
            self.close()  # before the new one: there might be no memory for both
            is_pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._buffer = self._new_buffer(room, is_pinned=is_pinned)
        return self._buffer

    def _new_buffer(self, room: int, *, is_pinned: bool) -> HostBuffer | None:
        from forge.process import memory  # a save that waits needs no copy

        available = memory.free_bytes()
        if available is None or room + RESERVE <= available:
            try:
                return HostBuffer(room, is_pinned=is_pinned)
            except MemoryError:
                available = memory.free_bytes()
        if not self._has_warned:
            self._has_warned = True
            messages.warn(
                f"Too little host memory to save in the background: a copy of the state takes"
                f" {messages.size(room)}, {messages.size(available or 0)} are available, and"
                f" {RESERVE >> 20} MiB must stay free. Until more is free, training waits during"
                " each save. In addition, a job of one rank saves before each long function of"
                " `run.every`; with several ranks, a stop waits for the end of these functions."
                " Request more memory for the job."
            )
        return None


class StagedFile:
    """The file of these tensors, which must not change until it is written, or copied.

    Args:
        layout: The positions of the tensors in the file.
        tensors: By name.
    """

    def __init__(self, layout: Layout, tensors: Tensors) -> None:
        self.layout = layout
        self.is_spent = False
        """Whether the copy is on disk (`Store.commit`), so that the next can reuse its memory."""
        self._tensors = tensors
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
        count = min(NUM_WRITERS, num_chunks(self.layout.size))
        if self._image is not None:
            return [self._slice] * count
        size = min(CHUNK, room_for(self.layout.size))
        rooms = [_chunk_buffer(size) for _ in range(count)]
        return [functools.partial(self._assembled, room) for room in rooms]

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


class HostBuffer:
    """`size` bytes of page-aligned private memory.

    The first write to a page takes three to four times as long as later ones: hence one buffer per
    run, reused by every save. Forked children do not inherit it (`MADV_DONTFORK`): otherwise each
    page that a save writes would be copied for the DataLoader workers.

    Raises:
        MemoryError: If there is not enough memory.
    """

    def __init__(self, size: int, *, is_pinned: bool = False) -> None:
        self.size = size
        num_bytes = max(size, 1) + HUGE
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{num_bytes} bytes: {error}") from error
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, name):
                with contextlib.suppress(
                    OSError
                ):  # for example a kernel without huge pages, only slower
                    mapping.madvise(getattr(mmap, name))
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        begin = -whole.data_ptr() % HUGE
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
