"""Random augmentation that does not depend on who draws it, or when."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

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
        before = rng.capture_cpu()
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)
        try:
            return self.dataset[index]
        finally:
            rng.restore(before)


def seeded(dataset: Dataset[Any], seed: int) -> SeededDataset:
    """Make `dataset`'s random draws a function of (seed, epoch, index).

    While a sample is drawn, python's, numpy's and torch's CPU generators are seeded, and put back
    afterwards. Workers, their number, prefetching and resumes then make no difference. Generators
    that the dataset made for itself (`numpy.random.default_rng()`) are not reached.

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
    return isinstance(dataset, SeededDataset)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell every seeded dataset inside `dataset` which epoch begins."""
    if isinstance(dataset, SeededDataset):
        dataset.set_epoch(epoch)
    inner = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    for one in inner:
        if isinstance(one, Dataset):
            set_epoch(one, epoch)
