"""Copies of the state for background saves: one host buffer as large as the state, reused."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format.manifest import Logged
from forge.checkpoint.format.names import FINAL
from forge.checkpoint.format.tensorfile import Layout
from forge.checkpoint.io.copying import digest
from forge.checkpoint.io.host_buffer import HostBuffer
from forge.checkpoint.save.staged_file import StagedFile, StreamedFile, room_for
from forge.process import memory

RESERVE = 256 << 20
"""Bytes of host memory that a copy must leave free."""


@dataclass(eq=False)
class Snapshot:
    """A state that is to be written to disk."""

    step: int
    tree: Any
    """The state as JSON, with references to tensors."""
    content: StagedFile | StreamedFile
    """Content of the tensors' file."""
    is_complete: bool
    logged: Logged = field(default_factory=dict)
    """The metrics logged up to this step."""
    parts: Collection[str] = ()
    """Names of sharded tensors: each rank has a different part, so ranks do not compare them."""
    replaces: bool = True
    """Write it even if a good checkpoint of its step exists."""
    is_final: bool = False
    """Whether code after the last loop has changed the state (a `final_step_<N>`)."""
    is_spent: bool = False
    """Whether the next snapshot can reuse the memory of this one."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory."""
        return f"{FINAL if self.is_final else ''}step_{self.step}"

    @property
    def is_independent(self) -> bool:
        """Whether it is a copy, so that training can change the state before it is written."""
        return isinstance(self.content, StagedFile)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors' file."""
        return self.content.layout.size

    def digests(self) -> dict[str, str]:
        """Name -> digest of each tensor that can be equal on several ranks."""
        tensors = self.content.tensors().items()
        return {name: digest(tensor) for name, tensor in tensors if name not in self.parts}

    def without(self, names: Collection[str]) -> StreamedFile:
        """The tensors' file without the tensors of these names."""
        kept = {name: t for name, t in self.content.tensors().items() if name not in names}
        return StreamedFile(Layout(kept), kept, [])


class StagingPool:
    """Makes snapshots that copy the tensors, or only refer to them."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._described: list[Any] = []
        self._arena: HostBuffer | None = None
        self._image: StagedFile | None = None
        self._last: weakref.ref[Snapshot] | None = None
        self._spare: list[HostBuffer] = []
        self._is_told = False

    def snapshot(
        self,
        step: int,
        tree: Any,
        tensors: dict[str, torch.Tensor],
        *,
        is_complete: bool,
        copy: bool,
    ) -> Snapshot:
        """Make a snapshot; with `copy`, training can change the tensors (if memory allows)."""
        layout = self._layout_of(tensors)
        image = self._image_for(layout, tensors) if copy else None
        if image is None:
            return Snapshot(step, tree, StreamedFile(layout, tensors, self._spare), is_complete)
        image.fill(tensors)
        snapshot = Snapshot(step, tree, image, is_complete)
        self._last = weakref.ref(snapshot)
        return snapshot

    def close(self) -> None:
        """Free the memory as soon as no save reads from it."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._image = None
        self._spare.clear()

    def _layout_of(self, tensors: dict[str, torch.Tensor]) -> Layout:
        described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        if self._layout is None or described != self._described:
            self._layout, self._described, self._image = Layout(tensors), described, None
        return self._layout

    def _image_for(self, layout: Layout, tensors: dict[str, torch.Tensor]) -> StagedFile | None:
        last = self._last() if self._last is not None else None
        if last is not None and not last.is_spent:
            self._arena = self._image = None  # the last copy is not written yet: it keeps them
        room = room_for(layout.size)
        if self._arena is None or self._arena.size < room:
            self.close()  # before the new one: there might be no memory for both
            self._arena = self._new_arena(room, is_pinned=any(t.is_cuda for t in tensors.values()))
        if self._arena is None:
            return None
        if self._image is None:
            self._image = StagedFile(layout, tensors, self._arena)
        return self._image

    def _new_arena(self, room: int, *, is_pinned: bool) -> HostBuffer | None:
        available = memory.free_bytes()
        if available is None or room + RESERVE <= available:
            try:
                return HostBuffer(room, is_pinned=is_pinned)
            except MemoryError:
                available = memory.free_bytes()
        if not self._is_told:
            self._is_told = True
            messages.warn(
                f"Too little host memory to save in the background: a copy of the state takes"
                f" {room / 2**30:.2f} GiB, {(available or 0) / 2**30:.2f} GiB are available, and"
                f" {RESERVE >> 20} MiB must stay free. Until more is free, training waits during"
                " each save. In addition, a job of one rank saves before each long function of"
                " `run.every`; with several ranks, a stop waits for the end of these functions."
                " Request more memory for the job."
            )
        return None
