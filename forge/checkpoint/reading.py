"""A checkpoint, read and verified; into live tensors where there are such.

The steps of `read`, of which none changes anything that is live:

    manifest, sizes, state as JSON     verified, decoded with tensors that have no data
    `place`                            compares that with the live objects, offers their tensors
    tensors                            verified; those without an offer are read into fresh memory

`Checkpoint.fill` then reads the others to where they were offered a place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import manifest
from forge.checkpoint.codec import PLAIN_TENSORS, Outline, decode
from forge.checkpoint.file_reading import CheckedFile
from forge.checkpoint.manifest import Manifest
from forge.checkpoint.names import STATE, TENSORS, step_of
from forge.checkpoint.tensor_reading import TensorFile
from forge.config import Verify
from forge.errors import CheckpointError, DamagedCheckpoint

Place = Callable[[dict[str, Any]], Iterable[tuple[Any, torch.Tensor]] | None]
"""Takes a state whose tensors have no data; gives pairs of such a tensor and a live one for it.

None says that the state has to stay as it was read, because it will be loaded more than once.
"""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """With live tensors where `place` offered them: they have their values after `fill`."""
    _owned: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    _tensors: TensorFile | None = field(default=None, compare=False, repr=False)
    _pending: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def fill(self) -> frozenset[int]:
        """Read what belongs into live tensors, once.

        Returns:
            The `id` of tensors in `state` which whoever loads it may keep: nothing else refers to
            them.
        Raises:
            CheckpointError: Where that failed half-way.
        """
        if not self._pending:
            return self._owned
        assert self._tensors is not None
        try:
            self._tensors.fill(self._pending)
        except DamagedCheckpoint as error:
            raise CheckpointError(
                f"{self.path}: could be verified, but not be read again: {error}. The live objects"
                " now hold a part of it, so that training cannot go on from them. Start the job"
                " again."
            ) from error
        finally:
            self._pending.clear()
            self._tensors.file.close()
        return self._owned


def read(path: Path, verify: Verify, place: Place | None = None) -> Checkpoint:
    """Read the checkpoint in the directory `path`.

    Args:
        place: Offers live tensors, which `Checkpoint.fill` will overwrite; whatever it raises
            comes out of here, unless the checkpoint turns out to be damaged.
    Raises:
        DamagedCheckpoint: Saying which file is wrong, what was expected and what was found.
    """
    described = manifest.read(path)
    if described.step != step_of(path):
        raise DamagedCheckpoint(f"its manifest is that of step {described.step}")
    if verify is not Verify.none:
        manifest.check_sizes(path, described)
    missing = {STATE, TENSORS} - described.files.keys()
    if missing:
        raise DamagedCheckpoint(f"its manifest lacks {', '.join(sorted(missing))}")
    is_checked = verify is Verify.full
    files: dict[str, CheckedFile] = {}
    found = None
    try:
        for name, entry in described.files.items():
            files[name] = CheckedFile(path / name, entry)
            if is_checked and name not in (STATE, TENSORS):
                files[name].read([], is_checked)
        text = files[STATE].content(is_checked)
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{STATE} cannot be read: {error}") from error
        found = _read(path, described, tree, files[TENSORS], is_checked, place)
        return found
    finally:
        for name, file in files.items():
            if found is None or name != TENSORS or not found._pending:
                file.close()


def _read(
    path: Path,
    described: Manifest,
    tree: Any,
    file: CheckedFile,
    is_checked: bool,
    place: Place | None,
) -> Checkpoint:
    try:
        tensors = TensorFile(file)
        outline = Outline(tensors.outline)
        shown = decode(tree, outline)
        offers = place(shown) if place is not None else None
    except CheckpointError:
        if is_checked:
            file.read([], is_checked)  # damage, if there is any, is what explains the rest
        raise
    targets = _targets(outline, offers or ())
    on_devices = {
        name: torch.empty_like(outline[name], device=device)
        for name, device in outline.devices.items()
        if device.type == "cuda" and name not in targets
    }
    values = tensors.read({*targets, *on_devices}, is_checked)
    tensors.fill(on_devices)  # nobody uses these yet
    values |= on_devices
    for name, stride in outline.strides.items():
        value = values[name]
        shaped = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
        values[name] = shaped.copy_(value)
    values |= targets
    state = decode(tree, values)
    uses = outline.uses if offers is not None else Counter()
    owned = frozenset(id(value) for name, value in values.items() if uses[name] == 1)
    return Checkpoint(path, described, state, owned, tensors, targets)


def _targets(
    outline: Outline, pairs: Iterable[tuple[Any, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The live tensors that can be read into, by the names of what belongs there.

    Not where something else in the state refers to the same data, and would see it change.
    """
    names = {id(tensor): name for name, tensor in outline.items()}
    offers: dict[str, list[torch.Tensor]] = {}
    for leaf, live in pairs:
        if id(leaf) in names:
            offers.setdefault(names[id(leaf)], []).append(live)
    refused = _overlapping(offers)
    return {
        name: lives[0]
        for name, lives in offers.items()
        if name not in refused
        and len(lives) == outline.uses[name]
        and name not in outline.strides
        and all(_can_take(live, outline[name]) for live in lives)
    }


def _can_take(live: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        _has_memory(live)
        and (live.dtype, live.shape) == (tensor.dtype, tensor.shape)
        and live.numel() > 0
        and live.is_contiguous()
        and not (live.is_conj() or live.is_neg())
    )


def _has_memory(live: torch.Tensor) -> bool:
    return (
        type(live) in PLAIN_TENSORS
        and live.layout is torch.strided
        and live.device.type in ("cpu", "cuda")
        and not live.is_nested
    )


def _overlapping(offers: dict[str, list[torch.Tensor]]) -> set[str]:
    """Names whose live tensors share memory with those of others: there, the order matters."""
    spans = sorted(
        (str(live.device), *_span(live), name)
        for name, lives in offers.items()
        for live in lives
        if _has_memory(live)
    )
    found: set[str] = set()
    reach = spans[0] if spans else None  # the span that goes furthest so far
    for span in spans[1:]:
        assert reach is not None
        if span[0] == reach[0] and span[1] < reach[2] and span[3] != reach[3]:
            found |= {span[3], reach[3]}
        if (span[0], span[2]) > (reach[0], reach[2]):
            reach = span
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.dtype.itemsize
