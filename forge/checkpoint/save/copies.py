"""Copies of the state for saves beside training: one arena, as large as the state, used again."""

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
from forge.checkpoint.io.arena import Arena
from forge.checkpoint.save.digest import digest
from forge.checkpoint.save.image import Image, Stream, room_for
from forge.process import memory

RESERVE = 256 << 20
"""Bytes of memory that a copy must leave free."""


@dataclass(eq=False)
class Snapshot:
    """State on its way to disk."""

    step: int
    tree: Any
    """The state as JSON, with references to tensors."""
    content: Image | Stream
    """The tensors' file."""
    is_complete: bool
    logged: Logged = field(default_factory=dict)
    """What had been logged by then."""
    parts: Collection[str] = ()
    """Tensors of which no other rank has the same: parts of a larger one."""
    replaces: bool = True
    """Whether it is written though a good checkpoint of its step is there."""
    is_final: bool = False
    """Whether it is what followed the last loop that has made this state."""
    is_spent: bool = False
    """Whether the copy may be overwritten by the next one."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{FINAL if self.is_final else ''}step_{self.step}"

    @property
    def is_independent(self) -> bool:
        """Whether training may change the state before this is written."""
        return isinstance(self.content, Image)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors' file."""
        return self.content.layout.size

    def digests(self) -> dict[str, str]:
        """A digest of each tensor that ranks may have in common, by name."""
        tensors = self.content.tensors().items()
        return {name: digest(tensor) for name, tensor in tensors if name not in self.parts}

    def without(self, names: Collection[str]) -> Stream:
        """The tensors' file, but for these."""
        kept = {name: t for name, t in self.content.tensors().items() if name not in names}
        return Stream(Layout(kept), kept, [])


class Copies:
    """Makes snapshots, with a copy of the tensors or without."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._described: list[Any] = []
        self._arena: Arena | None = None
        self._image: Image | None = None
        self._last: weakref.ref[Snapshot] | None = None
        self._spare: list[Arena] = []
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
        """A snapshot; with `copy` independent of what training does next, if memory allows."""
        layout = self._layout_of(tensors)
        image = self._image_for(layout, tensors) if copy else None
        if image is None:
            return Snapshot(step, tree, Stream(layout, tensors, self._spare), is_complete)
        image.fill(tensors)
        snapshot = Snapshot(step, tree, image, is_complete)
        self._last = weakref.ref(snapshot)
        return snapshot

    def close(self) -> None:
        """Give the memory back once nothing is still written from it."""
        if self._arena is not None:
            self._arena.close()
        self._arena = self._image = None
        self._spare.clear()

    def _layout_of(self, tensors: dict[str, torch.Tensor]) -> Layout:
        described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        if self._layout is None or described != self._described:
            self._layout, self._described, self._image = Layout(tensors), described, None
        return self._layout

    def _image_for(self, layout: Layout, tensors: dict[str, torch.Tensor]) -> Image | None:
        last = self._last() if self._last is not None else None
        if last is not None and not last.is_spent:
            self._arena = self._image = None  # its own copy is still to be written
        room = room_for(layout.size)
        if self._arena is None or self._arena.size < room:
            self.close()  # first: both at once may be too much
            self._arena = self._new_arena(room, is_pinned=any(t.is_cuda for t in tensors.values()))
        if self._arena is None:
            return None
        if self._image is None:
            self._image = Image(layout, tensors, self._arena)
        return self._image

    def _new_arena(self, room: int, *, is_pinned: bool) -> Arena | None:
        available = memory.free_bytes()
        if available is None or room + RESERVE <= available:
            try:
                return Arena(room, is_pinned=is_pinned)
            except MemoryError:
                available = memory.free_bytes()
        if not self._is_told:
            self._is_told = True
            messages.warn(
                f"A copy of the state needs {room / 2**30:.2f} GiB of host memory, and"
                f" {(available or 0) / 2**30:.2f} GiB are available ({RESERVE >> 20} MiB of it have"
                " to stay free): training waits for each save, and saves before each evaluation of"
                " `run.every`, as long as that is so. Ask for more memory."
            )
        return None
