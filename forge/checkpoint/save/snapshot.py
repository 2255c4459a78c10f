"""A state that is to be saved, and the memory for copies: one host buffer, reused by all saves."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from forge import messages
from forge.checkpoint.format.manifest import FINAL, Origin
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.host_memory import HostBuffer, digest
from forge.checkpoint.save.staged_file import StagedFile, Tensors, room_for, views_of
from forge.process import memory

RESERVE = 256 << 20
"""Bytes of host memory that a copy must leave free."""


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
        self._rooms: list[HostBuffer] = []
        self._has_warned = False

    def stage(self, tensors: Tensors, *, copy: bool) -> StagedFile:
        """The file of these tensors; with `copy`, training can change them (if memory allows)."""
        layout = self._layout_of(tensors)
        file = StagedFile(layout, tensors, self._rooms)
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
        self._rooms.clear()

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
                f" {room / 2**30:.2f} GiB, {(available or 0) / 2**30:.2f} GiB are available, and"
                f" {RESERVE >> 20} MiB must stay free. Until more is free, training waits during"
                " each save. In addition, a job of one rank saves before each long function of"
                " `run.every`; with several ranks, a stop waits for the end of these functions."
                " Request more memory for the job."
            )
        return None
