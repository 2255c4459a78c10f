"""Random augmentation that does not depend on who draws it, or when.

Each sample seeds the generators for itself. In a worker they stay where its draws have taken them:
what `collate_fn` draws next then follows from the batch's last sample, and from nothing before it.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, get_worker_info

from forge import rng


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose random draws are a function of (seed, epoch, index)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"forge.data.seeded needs a map-style dataset (with __getitem__ and __len__), got"
                f" {type(dataset).__name__}: samples of an iterable one have no index to seed with"
            )
        self.dataset = dataset
        self.seed = seed
        # In shared memory: persistent workers keep their first copy of the dataset.
        self._epoch = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch that samples are drawn for."""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Draw for this epoch from now on; `Run.steps` calls it."""
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

    While a sample is drawn, python's, numpy's and torch's CPU generators are seeded; without
    workers they are put back afterwards. Workers, their number, prefetching and resumes then make
    no difference. In workers `collate_fn` draws on from there: what it draws is a function of the
    batch's last sample. Generators that the dataset made for itself (`numpy.random.default_rng()`)
    are not reached.

    Args:
        dataset: A map-style dataset.
        seed: Seed of the whole run.
    Raises:
        TypeError: For an iterable-style dataset.
    """
    return SeededDataset(dataset, seed)


def is_seeded(dataset: Any) -> bool:
    """Whether all that a sample draws is a function of its index."""
    if type(dataset) is Subset:
        return is_seeded(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(is_seeded, dataset.datasets))
    return isinstance(dataset, SeededDataset) and not any(map(draws_for_itself, within(dataset)))


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell every seeded dataset inside `dataset` which epoch begins."""
    for one in within(dataset):
        if isinstance(one, SeededDataset):
            one.set_epoch(epoch)


def within(dataset: Any) -> Iterator[Any]:
    """`dataset`, and the datasets that it is made of."""
    yield dataset
    for one in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if isinstance(one, Dataset):
            yield from within(one)


def draws_for_itself(one: Any) -> bool:
    """Whether an object keeps a generator that only it knows."""
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return any(isinstance(value, kinds) for value in getattr(one, "__dict__", {}).values())
