"""The properties of a loader that must be equal for the rest of a pass to have the same batches.

A resume inside a pass repeats the pass and skips the batches taken. With another length, batch size
or number of ranks it would silently get other batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from forge.data import loaders

_WORDS = {
    "is_stateful": "whether it restores its place itself",
    "dataset": "the length of its dataset",
    "batch_size": "its batch size",
    "shuffle": "whether it is shuffled",
    "ranks": "the number of ranks",
}


@dataclass(frozen=True)
class Properties:
    """The properties of a loader; None: unknown."""

    name: str
    """Name of its class."""
    is_stateful: bool
    dataset: int | None = None
    batch_size: int | None = None
    shuffle: bool | None = None
    ranks: int = 1
    batches: int | None = None
    """Batches in a pass. They are not compared: a pass that was complete stays complete."""


def of(loader: Any, ranks: int) -> Properties:
    """The current properties of a loader or any iterable, in a job with so many ranks."""
    name, is_stateful = type(loader).__name__, loaders.keeps_place(loader)
    # The length of a loader that restores itself can be the number of batches left.
    batches = None if is_stateful else loaders.num_batches(loader)
    if not isinstance(loader, DataLoader):
        size = loaders.length(loader) if isinstance(loader, Sequence) else None
        return Properties(name, is_stateful, size, ranks=ranks, batches=batches)
    groups: Any = loader.batch_sampler
    sampler = getattr(groups, "sampler", loader.sampler if groups is None else groups)
    batch_size = getattr(loader if groups is None else groups, "batch_size", None)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    shuffle = bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)))
    return Properties(
        name,
        is_stateful,
        dataset=None if is_iterable else loaders.length(loader.dataset),
        batch_size=batch_size if type(batch_size) is int else None,
        shuffle=None if is_iterable else shuffle,
        ranks=ranks,
        batches=batches,
    )


def changes(before: Properties, now: Properties) -> str:
    """The changes since `before`, a phrase each; empty if there are none."""
    # Between a loader that restores its place and another one nothing else can be compared.
    names = list(_WORDS) if before.is_stateful == now.is_stateful else ["is_stateful"]
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
    return "; ".join(
        f"{_WORDS[name]} was {was!r} and is {found!r}"
        for name, (was, found) in pairs.items()
        if was != found and None not in (was, found)
    )
