"""Read and verify a checkpoint, then read it into live tensors if there are any.

The steps of `read`, which does not change any live object:

    manifest, sizes, state as JSON     verified; `Outline` decodes it with tensors without data
    `offer`                            compares that with the live objects, offers their tensors
    tensors                            all verified; those without a live tensor are loaded

`Checkpoint.fill` then reads the others into the live tensors. A tensor is read into the live
tensor that is offered for it, unless another part of the state refers to the same data, which
would change with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint.files import Destination, RankFiles
from forge.checkpoint.format import manifest, shards
from forge.checkpoint.format.decoding import Decoder, decode, stride_of
from forge.checkpoint.format.encoding import UNKNOWN
from forge.checkpoint.format.manifest import Manifest
from forge.checkpoint.format.shards import Box, Like, Shard
from forge.checkpoint.format.tensor_encoding import HUGE, PAGE, is_here, is_plain
from forge.checkpoint.retention import reading_lock
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint, StateMismatch
from forge.jobdir.job_files import step_of

Offers = Iterable[tuple[Any, "torch.Tensor | Like"]]
"""Pairs of a leaf of an outline and its live tensor, or a tensor that is sharded like it."""

Offer = Callable[[dict[str, Any]], Offers | None]
"""Takes a state whose tensors have no data; returns pairs of such a tensor and a live one for it.

It returns None if the state must not share memory with live tensors, since it is loaded again. For
a Run it is `in_place_targets` of `forge/state/restoring.py`.
"""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    """Contains the live tensors that were offered; these have their values after `fill`."""
    _owned: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    _files: RankFiles | None = field(default=None, compare=False, repr=False)
    _pending: list[Destination] = field(default_factory=list, compare=False, repr=False)

    def differing(self, *prefixes: str) -> list[str]:
        """Names of unsharded tensors that had other values on another rank than on rank 0.

        Empty if files that this rank does not read are damaged.

        Args:
            prefixes: Return only names that begin with one of these.
        Returns:
            The names, each once.
        """
        files = RankFiles(self.path, self.manifest)
        with contextlib.closing(files), contextlib.suppress(DamagedCheckpoint):
            ranks = range(1, self.manifest.world_size)
            names = dict.fromkeys(name for rank in ranks for name in files.tensors(rank).entries)
            return [n for n in names if n not in files.shards and n.startswith(prefixes)]
        return []

    def fill(self) -> frozenset[int]:
        """Read the tensors for which live ones were offered, once.

        Returns:
            The `id` of each tensor in `state` that `load_state_dict` can keep without a copy,
            since nothing else refers to it.
        Raises:
            CheckpointError: If reading failed, so that live tensors are half-loaded.
        """
        if self._files is None:
            return self._owned
        try:
            self._files.read(self._pending)
        except DamagedCheckpoint as error:
            raise CheckpointError(
                f"{self.path} was verified, but reading it into the model and optimizer failed:"
                f" {error}. The model and optimizer are now only partly loaded, so training cannot"
                " continue. Start the job again."
            ) from error
        finally:
            self._pending.clear()
            self._files.close()
        return self._owned


def first_good(
    candidates: Iterable[Path], read_one: Callable[[Path], Checkpoint]
) -> tuple[Checkpoint | None, dict[Path, DamagedCheckpoint]]:
    """The first checkpoint that verifies, or None; and the errors of those before it."""
    passed_over: dict[Path, DamagedCheckpoint] = {}
    for path in candidates:
        try:
            return read_one(path), passed_over
        except DamagedCheckpoint as error:
            passed_over[path] = error
    return None, passed_over


def read(
    path: Path,
    offer: Offer | None = None,
    verify: Verify = Verify.full,
    *,
    rank: int = 0,
    size: int | None = None,
    personal: Collection[str] = (),
) -> Checkpoint:
    """Read one rank's part of the checkpoint in the directory `path`.

    If the number of ranks has changed, each rank gets the state of rank 0, and of sharded tensors
    the part that it has now.

    Args:
        path: The directory.
        offer: Offers live tensors, which `Checkpoint.fill` overwrites. Its exceptions are raised
            here, unless the checkpoint turns out to be damaged.
        verify: What to verify; the manifest and the layout always are.
        rank: The rank whose part is read.
        size: The number of ranks now; None: as many as saved the checkpoint.
        personal: Keys of the state that each rank that existed before keeps for itself.
    Raises:
        DamagedCheckpoint: Names the damaged file, what was expected and what was found.
    """
    with reading_lock(path), contextlib.ExitStack() as stack:
        described = _manifest(path, verify)
        files = RankFiles(path, described, is_checked=verify is Verify.full)
        stack.callback(files.close)
        is_resized = size not in (None, described.world_size)
        base = 0 if is_resized else rank
        state, owned, pending = _read(files, base, files.tree(base), offer, is_resized=is_resized)
        if is_resized and 0 < rank < described.world_size:
            tree = files.tree(rank)
            own = {key: tree[key] for key in personal if key in tree}
            state |= _read(files, rank, own, None, is_resized=True)[0]
        if pending:
            stack.pop_all()  # `fill` closes the files
    return Checkpoint(path, described, state, owned, files if pending else None, pending)


def _manifest(path: Path, verify: Verify) -> Manifest:
    described = manifest.read(path)
    if step_of(path) not in (None, described.step):  # None: a copy under another name
        raise DamagedCheckpoint(
            f"expected the manifest of step {step_of(path)}, found that of step {described.step}"
        )
    if verify is not Verify.none:
        manifest.check_sizes(path, described)
    return described


def _read(
    files: RankFiles, rank: int, tree: Any, offer: Offer | None, *, is_resized: bool
) -> tuple[Any, frozenset[int], list[Destination]]:
    """Verify all files, and read the tensors of a rank's state for which none are offered.

    Returns:
        The state, the `id` of each tensor to which nothing else refers, and what to read later.
    """
    try:
        outline = Outline(files, rank)
        shown = outline.decode(tree)
        offered = None if offer is None else offer(shown)
        outline.offer(offered or ())
        pieces = {
            name: files.pieces(rank, name, saved.box, saved.shard)
            for name, saved in outline.saved.items()
        }
    except CheckpointError:
        files.read([])  # verifies: if the files are damaged, that is the cause of the error
        raise
    values: dict[str, torch.Tensor] = {}
    now: list[Destination] = []
    later: list[Destination] = []
    for name, saved in outline.saved.items():
        if saved.live is not None:
            values[name] = saved.live
            later.append(Destination(shards.local(saved.live), saved.box, pieces[name]))
        else:
            memory = _new_memory(saved, keeps_index=not is_resized)
            values[name] = memory if saved.like is None else shards.wrapped(memory, saved.like)
            now.append(Destination(memory, saved.box, pieces[name]))
    files.read(now)
    uses = {name: saved.uses for name, saved in outline.saved.items() if offered is not None}
    owned = frozenset(id(value) for name, value in values.items() if uses.get(name) == 1)
    return decode(tree, values), owned, later


def _new_memory(saved: SavedTensor, *, keeps_index: bool) -> torch.Tensor:
    device = saved.device if saved.like is None else saved.like.device
    if not keeps_index:  # the state is rank 0's, with rank 0's device index
        device = torch.device(device.type)
    try:
        memory = torch.empty(saved.box.shape, dtype=saved.leaf.dtype, device=device)
    except RuntimeError as error:  # too little memory, or a damaged header asks for too much
        raise DamagedCheckpoint(f"there is not enough memory to read it: {error}") from error
    return _in_huge_pages(memory)


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Request huge pages for a tensor that was never written to; returns the tensor.

    Without them, the first write to each small page takes longer than reading the file into it.
    A tensor over a mapping of our own would not work: its storage cannot be resized.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
    if advice is not None and tensor.device.type == "cpu" and end - begin >= HUGE:
        # This fails if the kernel has no huge pages, which only makes loading slower.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    return tensor


@dataclass(eq=False)
class SavedTensor:
    """A tensor of a state: how it was saved, and what is offered for it."""

    leaf: torch.Tensor
    """A tensor without data, of the shape of the whole tensor."""
    shard: Shard | None
    box: Box
    """The part of the whole tensor that this rank needs."""
    device: torch.device
    uses: int = 0
    """How often the state refers to it."""
    is_reordered: bool = False
    """Whether its elements are not in the usual order."""
    like: torch.Tensor | None = None
    """A live DTensor, if it has to be sharded like that one."""
    offers: list[torch.Tensor] = field(default_factory=list)
    live: torch.Tensor | None = None
    """The live tensor that it is read into; None: a new one."""


class Outline(Decoder):
    """Decodes a rank's state with tensors that have no data, and notes how it uses each of them.

    A leaf that needs data to be decoded becomes `UNKNOWN`.
    """

    def __init__(self, files: RankFiles, rank: int) -> None:
        super().__init__({})
        self._files = files
        self._rank = rank
        self.saved: dict[str, SavedTensor] = {}
        """The tensors that the state refers to, by name."""
        self._names: dict[int, str] = {}
        """`id` of a leaf -> the name of its tensor."""
        for one in (0, rank):
            files.tensors(one)  # verified even if the state has no tensors

    def tensor(self, described: dict[str, Any], shard: Shard | None = None) -> torch.Tensor:
        """A leaf for the tensor; if it was sharded, it has the shape of the whole tensor."""
        name = described["!tensor"]
        _, entry = self._files.find(self._rank, name)
        saved = self.saved.get(name)
        if saved is None:
            shape = entry.shape if shard is None else shard.of
            leaf = torch.empty(shape, dtype=entry.dtype, device="meta")
            device = _device_of(described)
            saved = self.saved[name] = SavedTensor(leaf, shard, Box.whole(shape), device)
            self._names[id(leaf)] = name
        if shard != saved.shard or (shard is not None and shard.box.shape != entry.shape):
            raise DamagedCheckpoint(
                f"{name}: expected {shard}, found a tensor of shape {list(entry.shape)}"
            )
        saved.uses += 1
        saved.is_reordered |= bool(stride_of(described, entry.shape))
        return saved.leaf

    sharded = tensor

    def malformed(self, tag: str, error: Exception) -> Any:
        """`UNKNOWN`: some values cannot be decoded without their data."""
        return UNKNOWN

    def offer(self, pairs: Offers) -> None:
        """Choose the memory that each tensor is read into.

        Raises:
            StateMismatch: If one saved tensor corresponds to live tensors with different shardings.
        """
        for leaf, offered in pairs:
            name = self._names.get(id(leaf))
            if name is None:
                continue
            saved = self.saved[name]
            live = offered.tensor if isinstance(offered, Like) else offered
            if shards.is_sharded(live):
                box = shards.shard_of(live).box
                if saved.like is None:
                    saved.like, saved.box = live, box
                if saved.box != box:
                    raise StateMismatch(
                        f"{name}: was one (tied) tensor when it was saved, but is sharded in two"
                        " different ways here. Tie the parameters before fully_shard, as when it"
                        " was saved"
                    )
            if not isinstance(offered, Like):
                saved.offers.append(live)
        shared = _sharing(self.saved)
        for saved in self.saved.values():
            if saved not in shared and _can_take(saved):
                saved.live = saved.offers[0]


def _device_of(described: dict[str, Any]) -> torch.device:
    if "device" not in described:
        return _CPU
    device = torch.device(described["device"])
    return device if is_here(device) else _CPU  # loading moves it to the parameter's device


def _can_take(saved: SavedTensor) -> bool:
    if not saved.offers or len(saved.offers) != saved.uses or saved.is_reordered:
        return False
    dtype, shape = saved.leaf.dtype, saved.box.shape
    return all(
        _has_memory(live)
        and (live.dtype, tuple(live.shape)) == (dtype, shape)
        and live.numel() > 0
        and live.is_contiguous()
        and not (live.is_conj() or live.is_neg())
        for live in map(shards.local, saved.offers)
    )


def _has_memory(live: torch.Tensor) -> bool:
    return is_plain(live) and live.device.type in ("cpu", "cuda")


def _sharing(saved: dict[str, SavedTensor]) -> set[SavedTensor]:
    """Those whose live tensors share storage with another's: the order of reading would matter."""
    users: dict[tuple[torch.device, int], set[SavedTensor]] = {}
    for one in saved.values():
        for live in filter(_has_memory, map(shards.local, one.offers)):
            storage = live.device, live.untyped_storage().data_ptr()
            users.setdefault(storage, set()).add(one)
    return {one for some in users.values() if len(some) > 1 for one in some}
