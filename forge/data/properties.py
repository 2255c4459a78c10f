"""The properties of a loader on which its batches depend; `changed_loaders.py` compares them.

A resume inside an epoch repeats the pass and skips the batches taken. With another length, batch
size or sampler it would silently get other batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from forge.data import loaders
from forge.data.loaders import FirstSeen, length


@dataclass(frozen=True)
class Properties:
    """The properties of a loader; None: unknown, or not always the same."""

    name: str
    """Name of its class."""
    kind: str
    is_stateful: bool
    dataset: int | None = None
    batch_sampler: str | None = None
    sampler: str | None = None
    samples: int | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    batches: int | None = None
    workers: int | None = None
    """None: the samples do not depend on it."""
    drawing_workers: int | None = None
    """None: random draws in samples do not depend on it, or `workers` covers it."""


def of(loader: Any) -> Properties:
    """The current properties of a loader or any iterable."""
    is_stateful = loaders.has_state(loader)
    if not isinstance(loader, DataLoader):
        # The length of a loader that restores itself can be the number of batches left.
        batches = None if is_stateful else _steady_length(loader)
        return Properties(type(loader).__name__, "no DataLoader", is_stateful, batches=batches)
    groups: Any = loader.batch_sampler
    sampler = getattr(groups, "sampler", loader.sampler if groups is None else None)
    sizes: Any = loader if groups is None else groups
    is_iterable = isinstance(loader.dataset, IterableDataset)
    is_fixed = is_iterable or is_stateful
    batch_size, drop_last = (getattr(sizes, name, None) for name in ("batch_size", "drop_last"))
    return Properties(
        type(loader).__name__,
        "DataLoader",
        is_stateful,
        dataset=(_steady_length if is_iterable else length)(loader.dataset),
        batch_sampler=type(groups).__name__,
        sampler=type(sampler).__name__,
        samples=_steady_length(sampler),
        batch_size=batch_size if type(batch_size) is int else None,
        drop_last=drop_last if type(drop_last) is bool else None,
        batches=None if is_iterable else _steady_length(loader),
        workers=loader.num_workers if is_fixed else None,
        drawing_workers=None if is_fixed or loaders.is_seeded(loader) else loader.num_workers,
    )


_first: FirstSeen[int | None] = FirstSeen()
"""Lengths at the first call."""


def _steady_length(one: Any) -> int | None:
    """Its length; None once it differs from the first, as if each epoch had its own length."""
    now = length(one)
    try:
        first = _first.of(one, now)
    except TypeError:  # for example a list
        return now
    return now if now == first else None
