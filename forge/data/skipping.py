"""The rest of an epoch: its batches without the first ones, which a resumed job has trained on.

DataLoader                 skips indices if that is exact: without workers, or `seeded`
DataLoader with workers    loads the batches again, so that workers draw the same numbers
any other iterable         iterates again; also a DataLoader with its own `__iter__`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from forge.data import loaders
from forge.data.workers import iter_with_blocked_signals
from forge.errors import StateMismatch
from forge.state import rng


class Rest:
    """The rest of one epoch of a loader.

    Args:
        loader: Any iterable.
        has_workers: Whether its persistent workers had started before the epoch.
        begin_again: Restores the random state and the parts of the loader from the epoch's start.
        first: The random state with which the first batch is taken, if it is not that of the start.
    """

    def __init__(
        self,
        loader: Any,
        has_workers: bool,  # noqa: FBT001 - of the state
        begin_again: Callable[[], None],
        first: dict[str, Any] | None,
    ) -> None:
        self._loader = loader
        self._has_workers = has_workers
        self._begin_again = begin_again
        self._first = first

    def iterate(self, count: int, *, is_replayed: bool) -> Iterator[Any]:
        """An iterator over the epoch, without its first `count` batches.

        Args:
            is_replayed: Whether forge counts the batches; else the loader keeps its position.
        Raises:
            StateMismatch: If the epoch has fewer batches.
        """
        if not (is_replayed and isinstance(self._loader, DataLoader)):
            return _without(self._make_iterator(), count)
        if self._can_skip_indices():
            return self._iter_skipping_indices(count)
        if not self._redraws():
            return _without(self._make_iterator(), count)
        # The order that persistent workers get is that of their epoch, whatever they draw.
        with self._sampling(_Skipping(self._sampler, 0, self._begin_again)):
            # A generator function as `__iter__` reads its sampler only at its first batch.
            return _without(self._make_iterator(), count)

    def _make_iterator(self) -> Iterator[Any]:
        """A new iterator, with the random state that its first batch is taken with."""
        iterator = iter_with_blocked_signals(self._loader)
        if self._first is not None:
            rng.restore(self._first)
        return iterator

    def _can_skip_indices(self) -> bool:
        return (
            not loaders.has_own_iter(self._loader)
            and not isinstance(self._loader.dataset, IterableDataset)
            and (self._loader.num_workers == 0 or loaders.is_seeded(self._loader))
        )

    def _redraws(self) -> bool:
        """Persistent workers draw a seed only as they start; a new iterator draws again."""
        is_iterable = isinstance(self._loader.dataset, IterableDataset)
        return self._loader.persistent_workers and self._has_workers and not is_iterable

    def _iter_skipping_indices(self, count: int) -> Iterator[Any]:
        before = self._begin_again if self._redraws() else None
        skipping = _Skipping(self._sampler, count, before)
        with self._sampling(skipping):
            iterator = self._make_iterator()
        if not skipping.is_begun:  # `_get_iterator` is a generator function: skip batches instead
            return _without(iterator, count)
        if count:
            skipping.skip()
        return iterator

    @property
    def _sampler_name(self) -> str:
        return "sampler" if self._loader.batch_sampler is None else "batch_sampler"

    @property
    def _sampler(self) -> Any:
        """The sampler that yields the loader's indices."""
        return getattr(self._loader, self._sampler_name)

    @contextmanager
    def _sampling(self, skipping: _Skipping) -> Iterator[None]:
        """In the block, the loader's indices come from `skipping`."""
        name, inner = self._sampler_name, self._sampler
        self._loader.__dict__[name] = skipping  # DataLoader forbids a plain assignment
        try:
            yield
        finally:
            self._loader.__dict__[name] = inner


class _Skipping:
    """A sampler that skips its first indices, the first time it is iterated."""

    def __init__(self, inner: Any, count: int, before: Any) -> None:
        self._inner = inner
        self._count = count
        self._before = before
        self._iterator: Iterator[Any] = iter(())
        self._is_skipped = False
        self.is_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self._iterator, self.is_begun = iter(self._inner), True
        return self if not self._is_skipped else self._iterator

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Skip the indices; not before the loader drew its own seed, as in a first epoch."""
        if self._is_skipped:
            return
        self._is_skipped = True
        if self._before is not None:
            self._before()
        _without(self._iterator, self._count)


def _without(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator without its first batches.

    Raises:
        StateMismatch: If it has fewer batches.
    """
    for taken in range(count):
        try:
            next(iterator)
        except StopIteration:
            raise StateMismatch(
                f"data: the saved position is {count} batches into an epoch, but the loader now"
                f" ends after {taken}. Was the dataset, the batch size or drop_last changed?"
            ) from None
    return iterator
