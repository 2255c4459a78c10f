"""Skipping the first batches of an epoch: the whole batches, or only their indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forge.errors import StateMismatch


class Skipping:
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
        without(self._iterator, self._count)


def without(iterator: Iterator[Any], count: int) -> Iterator[Any]:
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
