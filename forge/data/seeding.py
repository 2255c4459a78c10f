"""Random augmentation that does not depend on which worker draws it, or when.

Each sample seeds the generators. In a worker they continue from there: what `collate_fn` draws then
depends on the batch's last sample only.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, get_worker_info

from forge import messages
from forge.state import rng

OTHER_GENERATORS = (
    "Draw from the global generators (torch.rand, numpy.random, random), or make one from them"
    " for each use: numpy.random.default_rng(int(torch.randint(2**62, ())))."
)
"""Advice about a generator that `seeded` does not seed."""


def not_seeded(own: list[str]) -> str:
    """The begin of a warning about generators that `seeded` does not seed, by their names."""
    return f"forge.data.seeded does not seed your own random generators ({', '.join(own)})"


_DEPTH = 4
_WIDTH = 8
"""How deep, and in how many members of a container, generators are searched for."""


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose random draws are a function of (seed, epoch, index)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "forge.data.seeded needs a map-style dataset (with __getitem__ and __len__), found"
                f" {type(dataset).__name__}: samples of an iterable dataset have no index to seed"
                " with"
            )
        own = [name for one in within(dataset) for name in own_generators(one)]
        if own:
            messages.warn(
                f"{not_seeded(own)}, and their state is not saved: after a resume they can draw"
                f" other values than in an uninterrupted run. {OTHER_GENERATORS}"
            )
        self.dataset = dataset
        self.seed = seed
        # In shared memory: persistent workers keep their first copy of the dataset.
        self._epoch = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch for which samples are drawn."""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for which samples are drawn; `Run.steps` calls it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        key = f"{self.seed},{self.epoch},{index}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        before = rng.capture_cpu() if get_worker_info() is None else None
        rng.seed_cpu(seed)
        try:
            return self.dataset[index]
        finally:
            if before is not None:
                rng.restore(before)


def seeded(dataset: Dataset[Any], seed: int) -> SeededDataset:
    """Make `dataset`'s random draws a function of (seed, epoch, index).

    For each sample the CPU generators of python, numpy and torch are seeded; without workers they
    are restored afterwards. Draws then do not depend on workers, prefetching or resumes. In a
    worker `collate_fn` continues with the generators of the batch's last sample. Generators that
    the dataset keeps itself (`self.rng = numpy.random.default_rng()`) are not controlled; a
    warning names them.

    Args:
        dataset: A map-style dataset.
        seed: Seed of the whole run.
    Returns:
        A dataset with the same samples.
    Raises:
        TypeError: If the dataset is iterable-style.
    """
    return SeededDataset(dataset, seed)


def is_seeded(dataset: Any) -> bool:
    """Whether all random draws of a sample depend only on its index."""
    if type(dataset) is Subset:
        return is_seeded(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(is_seeded, dataset.datasets))
    return isinstance(dataset, SeededDataset) and not any(map(own_generators, within(dataset)))


def set_epoch(dataset: Any, epoch: int) -> None:
    """Set the epoch of every seeded dataset inside `dataset`."""
    for one in within(dataset):
        if isinstance(one, SeededDataset):
            one.set_epoch(epoch)


def within(dataset: Any) -> Iterator[Any]:
    """`dataset`, and all datasets inside it."""
    yield dataset
    for one in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if isinstance(one, Dataset):
            yield from within(one)


def own_generators(one: Any, max_depth: int = _DEPTH) -> list[str]:
    """Generators that the object or its members keep, for example `Noise.transform.rng`."""
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    known: tuple[Any, ...] = (torch.default_generator, cast("Any", random.random).__self__)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
        known += (numpy.random.random.__self__,)
    seen: set[int] = set()

    def search(value: Any, name: str, depth: int) -> Iterator[str]:
        is_dataset = depth > 0 and isinstance(value, Dataset)  # `within` covers it
        if is_dataset or id(value) in seen or any(value is one for one in known):
            return
        seen.add(id(value))
        if isinstance(value, kinds):
            yield name
        elif depth < max_depth:
            for key, member in _members(value):
                yield from search(member, f"{name}{key}", depth + 1)

    return list(search(one, type(one).__name__, 0))


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of an object."""
    if isinstance(value, dict):
        yield from ((f"[{k!r}]", v) for k, v in itertools.islice(value.items(), _WIDTH))
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", v) for i, v in enumerate(value[:_WIDTH]))
    elif not isinstance(value, type | ModuleType | torch.Tensor):
        attributes = getattr(value, "__dict__", None)
        yield from ((f".{k}", v) for k, v in dict(attributes or {}).items())
