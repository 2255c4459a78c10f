"""The properties of a loader on which its batches depend; saved, and compared when resuming.

A resume inside an epoch repeats the pass and skips the batches taken. With another length, batch
size or sampler it would silently get other batches. So inside an epoch a change is refused, and
between two epochs it is logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from forge import messages
from forge.data import loaders
from forge.data.loaders import FirstSeen, length
from forge.errors import ConfigError

_WORDS = {
    "kind": "its kind",
    "is_stateful": "whether it has a state_dict",
    "dataset": "the length of its dataset",
    "batch_sampler": "its batch sampler",
    "sampler": "its sampler",
    "samples": "the length of its sampler",
    "batch_size": "its batch size",
    "drop_last": "its drop_last",
    "batches": "the number of its batches",
    "workers": "its number of workers",
}

_KIND = ("kind", "is_stateful")
"""If one of these has changed, the others mean nothing."""


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

    def changes(self, before: Properties) -> list[str]:
        """The changes since `before`, a phrase each."""
        is_same_kind = all(getattr(self, name) == getattr(before, name) for name in _KIND)
        names = _WORDS if is_same_kind else _KIND
        pairs = {name: (getattr(before, name), getattr(self, name)) for name in names}
        return [
            f"{_WORDS[name]} was {was!r} and is {now!r}"
            for name, (was, now) in pairs.items()
            if was != now and None not in (was, now)
        ]

    def name_changes(self, before: Properties) -> None:
        """Log the changes of a loader that is between two passes."""
        self._say(self.changes(before))
        self.name_workers(before)

    def _say(self, changes: list[str]) -> None:
        if changes:
            messages.warn(
                f"The loader ({self.name}) has changed since the checkpoint was saved:"
                f" {'; '.join(changes)}. The checkpoint is between two passes, so the job resumes"
                " with the loader as it is now"
            )

    def name_workers(self, before: Properties) -> None:
        """Log that random draws in samples can differ."""
        was, now = before.drawing_workers, self.drawing_workers
        if was != now and None not in (was, now):
            messages.warn(
                f"The loader ({self.name}) had {was} workers when the checkpoint was saved, and has"
                f" {now} now: random draws in samples differ from those of an uninterrupted run."
                " With forge.data.seeded(dataset, seed) they depend only on (seed, epoch, index),"
                " with any number of workers"
            )

    def batches_to_skip(self, taken: int, before: Properties) -> int:
        """Number of batches to skip in an epoch of which `taken` were taken before.

        Raises:
            ConfigError: Names the changes, which would give other batches.
        """
        found = self.changes(before)
        if not found:
            return taken
        if taken == before.batches and self.batches is not None and not self.is_stateful:
            self._say(found)
            return self.batches  # the end of the epoch stays the end
        problem = (
            f"the checkpoint was saved after {taken} batches of a pass, and the loader"
            f" ({self.name}) has changed since: {'; '.join(found)}. The rest of the pass would have"
            " other batches. Build the loader as before, or start in a new directory."
        )
        raise ConfigError([problem], "The data of this resume")


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
