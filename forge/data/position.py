"""The position of a run in its data, to the batch, for every kind of loader.

The batches of an epoch follow from the random state at its start. A position is therefore (epoch,
random state at its start, batches taken). A resume restores the random state, makes the iterator,
and skips the same number of batches:

    StatefulDataLoader, `exact = True`   restores itself
    any other                            is iterated again, without its first batches: `skipping`

A loader that has changed since, or another number of ranks, is refused inside an epoch, and logged
between two epochs: see `properties`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from forge import messages
from forge.compat import of_torch
from forge.data import loaders, properties, seeding
from forge.data.parts import LoaderParts
from forge.data.properties import Properties
from forge.data.workers import iter_with_blocked_signals
from forge.errors import ConfigError
from forge.group import collectives
from forge.process import sections
from forge.state import rng
from forge.state.adapters import read_state


class Position:
    """The position of one loop in its loader.

    `sets_epoch`: whether forge calls `set_epoch` of the samplers; else their epoch is the script's.
    """

    def __init__(self, loader: Iterable[Any], epoch: int = 0, *, sets_epoch: bool = True) -> None:
        self._loader: Any = loader
        self._sets_epoch = sets_epoch
        self._shuffles_by = None if sets_epoch else loaders.shuffling_epoch(loader)
        """The epoch from which the order of this pass is drawn; None: from something else."""
        self._is_order_named = False
        self._iterator: Iterator[Any] | None = None
        self._start: dict[str, Any] | None = None
        self._is_waiting = False
        """Whether `begin_pass` has made the iterator, and no batch was taken from it yet."""
        self.epoch = epoch
        self.taken = 0
        """Batches taken in this epoch."""
        self._total = 0
        self.is_over = False
        """Whether the pass read by `next_of_pass` has ended."""
        self._is_left = False
        """Whether the pass before this one was left before its last batch."""
        self._was_read = False
        """Whether that pass used the same loader, so that this one can continue it."""
        self.is_stateful = loaders.keeps_place(loader)
        """Whether the loader saves its position itself."""
        self._is_readable = not self.is_stateful
        """Whether its state was read once: an error at the stop would lose all progress."""
        self._parts = LoaderParts(loader)
        _, self._num_ranks = collectives.rank_and_size()
        self._properties = self._properties_now()
        """The loader's state at the start of this epoch."""

    # -- taking --------------------------------------------------------------------------------

    def next(self) -> Any:
        """The next batch; begins a new epoch when one ends.

        Raises:
            ValueError: If the loader is empty, or is an exhausted one-shot iterator.
        """
        if self._iterator is not None:
            try:
                return self._count(next(self._iterator))
            except StopIteration:
                self._end_epoch()
        try:
            self._begin_epoch()
            assert self._iterator is not None
            return self._count(next(self._iterator))
        except StopIteration:
            if isinstance(self._loader, Iterator) and self._total:
                raise ValueError(
                    f"The loader ({type(self._loader).__name__}) ended after {self._total} batches."
                    " It is an iterator, which cannot begin a second epoch. Pass the iterable"
                    " itself (a DataLoader, a list), not iter(...) of it. Pass several loaders as"
                    " run.steps(n, loader, other) instead of zip(loader, other)."
                ) from None
            raise ValueError(
                f"The loader ({type(self._loader).__name__}) yielded no batch in epoch"
                f" {self.epoch}. Is its dataset empty, or smaller than a batch with drop_last?"
            ) from None
        except Exception:
            self._iterator = None  # the epoch has not begun: draw its order again
            if self._start is not None:
                self._parts.restore(self._start["parts"])
            raise

    def begin_pass(self) -> None:
        """Make the iterator of this epoch, some time before its first batch is taken."""
        if self._iterator is None:
            self._begin_epoch()
            self._is_waiting = True

    def next_of_pass(self) -> Any:
        """The next batch of this epoch; sets `is_over` if there is none."""
        if self._iterator is None:
            self._begin_epoch()
        if self._is_waiting and self._start is not None:  # a sampler draws its order only now
            self._start["first"] = rng.capture()
        self._is_waiting = False
        assert self._iterator is not None
        try:
            return self._count(next(self._iterator))
        except StopIteration:
            self.end_pass(is_left=False)
            return None

    def end_pass(self, *, is_left: bool) -> None:
        """End the pass; the loader stays, for its state.

        Args:
            is_left: Whether by a `break`.
        """
        self._iterator, self.is_over, self._is_left = None, True, is_left

    def follow(self, before: Position) -> None:
        """Begin where the pass before this one has left the loader, if it is the same."""
        if before._loader is self._loader:
            self._was_read = before._was_read or before.taken > 0
            self._is_left = before._is_left
        is_repeated = self._shuffles_by is not None and self._shuffles_by == before._shuffles_by
        if is_repeated and not before._is_order_named:
            messages.warn(loaders.SAME_ORDER.format(epoch=self._shuffles_by))
        self._is_order_named = is_repeated or before._is_order_named

    def _count(self, batch: Any) -> Any:
        self.taken += 1
        self._total += 1
        if not self._is_readable:
            read_state("the loader", self._loader)
            self._is_readable = True
        return batch

    def _end_epoch(self) -> None:
        self._iterator = None
        self.epoch += 1
        self.taken = 0

    def begin_after(self, count: int) -> None:
        """Begin this epoch after its first batches, which are not loaded if that is exact."""
        self._begin_epoch(without=count)
        self.taken, self._total = count, self._total + count

    def _begin_epoch(self, without: int = 0) -> None:
        sections.current().begin_epoch()
        # Also of devices: an order is drawn there if torch's default device is one of them.
        self._start = {"rng": rng.capture(), "parts": self._parts_state()}
        self._start["has_workers"] = self._has_workers()
        if loaders.has_state(self._loader) and not self.is_stateful:
            rng.restore(self._start["rng"])  # reading its state can make an iterator, which draws
        self._announce_epoch()
        self._properties = self._properties_now()
        make = iter_with_blocked_signals
        self._iterator = self._iter_without(without) if without else make(self._loader)

    def _announce_epoch(self) -> None:
        seeding.set_epoch(getattr(self._loader, "dataset", None), self.epoch)
        for sampler in loaders.samplers(self._loader).values() if self._sets_epoch else ():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)

    def close(self) -> None:
        """Drop the iterator and its workers."""
        self._iterator = None
        self._loader = None

    # -- saving --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The position, for a checkpoint."""
        return self.completed(self.mark())

    def mark(self) -> dict[str, Any]:
        """The part of `state` that the next batch can change; cheap enough for each batch."""
        is_begun = self._iterator is not None
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "taken": self.taken,
            "total": self._total,
            "start": self._start if is_begun else None,
            "parts": self._parts_state(),
            "is_left": is_begun or self._is_left,
            "has_workers": self._has_workers(),
        }
        if self.is_stateful and (is_begun or self.taken or self._was_read):
            state["loader"] = self._loader.state_dict()
        return state

    def completed(self, mark: dict[str, Any]) -> dict[str, Any]:
        """The state of a `mark` of this position."""
        is_begun = mark["start"] is not None
        return {
            **mark,
            "properties": vars(self._properties if is_begun else self._properties_now()),
        }

    def load_finished(self, state: dict[str, Any]) -> None:
        """Restore a loader whose loop or pass had ended; the next pass can continue from there.

        The state of a loader of another kind, or of other ranks, is not restored.
        """
        saved = _properties_in(state)
        if (saved.ranks, saved.is_stateful) != (self._num_ranks, self.is_stateful):
            return
        is_to_start = self._is_persistent and not self.is_stateful and not self._has_workers()
        with rng.unchanged():
            if is_to_start and state.get("has_workers", True):  # the next pass draws no seed
                # Not its own `__iter__`, which can be a generator function.
                iter_with_blocked_signals(self._loader, DataLoader.__iter__)
            if "loader" in state:
                self._loader.load_state_dict(copy.deepcopy(state["loader"]))
                # A StatefulDataLoader loads its state only when its next iterator is made.
                is_pending = getattr(self._loader, "next_iter_state", None) is not None
                if state["is_left"] or is_pending:  # as at the end of the pass: a new epoch is next
                    iter_with_blocked_signals(self._loader)
                self._was_read, self._is_left = True, state["is_left"]
            self._parts.restore(state["parts"])

    def _has_workers(self) -> bool:
        """Whether persistent workers have started: a pass draws a seed only if it starts them."""
        return self._is_persistent and of_torch.keeps_iterator(self._loader)

    @property
    def _is_persistent(self) -> bool:
        """Whether its workers persist; those of Accelerate's loaders belong to one inside."""
        is_own = isinstance(self._loader, DataLoader)
        is_own &= not hasattr(self._loader, "base_dataloader")
        return is_own and self._loader.persistent_workers

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the random state is wherever that left it.

        Raises:
            ConfigError: Names what has changed of the loader inside an epoch.
            StateMismatch: If the loader cannot go there.
        """
        saved, now = _properties_in(state), self._properties_now()
        changed, taken = properties.changes(saved, now), state["taken"]
        is_inside = state["start"] is not None
        is_complete = taken == saved.batches and now.batches is not None
        if changed and is_inside and not is_complete:
            problem = (
                f"the checkpoint was saved after {taken} batches of a pass, and the loader"
                f" ({now.name}) has changed since: {changed}. The rest of the pass would have other"
                " batches. Build the loader as before, or start in a new directory."
            )
            raise ConfigError([problem], "The data of this resume")
        self._iterator = None
        if self._is_persistent:
            of_torch.forget_iterator(self._loader)  # else it would continue its current epoch
        self.epoch, self._total = state["epoch"], state["total"]
        self._start = state["start"]
        if not is_inside:
            self.load_finished(state)
            self.name_changes(state)
            self.taken = taken
            return
        if changed:  # all batches of the pass were taken: the next pass is of the present loader
            self.name_changes(state)
            assert now.batches is not None
            taken = now.batches
            self._start = {"rng": rng.capture(), "parts": self._parts_state()}
            self._iterator = iter(())
        else:
            self._restore_start()
            self._announce_epoch()
            if self.is_stateful:
                self._loader.load_state_dict(state["loader"])
                self._iterator = iter_with_blocked_signals(self._loader)
            else:
                self._iterator = self._iter_without(taken)
        self._properties = now
        self.taken, self._is_waiting = taken, taken == 0
        if not changed:
            self._parts.restore_present(state["parts"])

    def name_changes(self, state: dict[str, Any]) -> None:
        """Log what has changed since a state was saved between two epochs."""
        now = self._properties_now()
        if changed := properties.changes(_properties_in(state), now):
            messages.warn(
                f"The loader ({now.name}) has changed since the checkpoint was saved: {changed}."
                " The checkpoint is between two passes, so the job resumes with the loader as it"
                " is now"
            )

    def _properties_now(self) -> Properties:
        return properties.of(self._loader, self._num_ranks)

    def _restore_start(self) -> None:
        assert self._start is not None
        rng.restore(self._start["rng"])
        self._parts.restore(self._start["parts"])

    def _begin_again(self) -> None:
        self._restore_start()
        self._announce_epoch()

    def _iter_without(self, count: int) -> Iterator[Any]:
        """An iterator over the epoch of `_start`, without its first batches."""
        from forge.data.skipping import Rest  # only a resume inside an epoch skips batches

        first = self._start.get("first") if self._start is not None else None
        has_workers = self._start is not None and self._start.get("has_workers", self.epoch > 0)
        rest = Rest(self._loader, has_workers, self._begin_again, first)
        return rest.iterate(count, is_replayed=not self.is_stateful)

    def _parts_state(self) -> dict[str, Any]:
        return self._parts.state(is_place=self.is_stateful)


def _properties_in(state: dict[str, Any]) -> Properties:
    return Properties(**state["properties"])
