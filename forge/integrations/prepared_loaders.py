"""Reads a loader so that its place in the data is saved, also if Accelerate has prepared it.

Accelerate's loaders read one batch ahead of the loop, from a loader inside them. So forge counts
the batches of that inner loader, and a resumed job reads the batch again that was ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler

import forge

_AHEAD = 1
"""Batches that a prepared loader reads ahead."""


class _Counted:
    """The loader inside a prepared one: the same, but its batches are counted."""

    def __init__(self, loader: Any, batches: Any, prepared: Any = None) -> None:
        self._loader, self._batches, self._prepared = loader, batches, prepared

    def __iter__(self) -> Iterator[Any]:
        if self._prepared is not None:
            self._batches.set_epoch(self._prepared.iteration)
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet set, while a copy is made
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # `isinstance(loader, DataLoader)` holds
        return self._loader.__class__


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate has prepared a loader."""
    return hasattr(loader, "base_dataloader")


def read(loader: Any) -> tuple[Any, Any]:
    """Count the batches of a loader.

    Args:
        loader: Any iterable of batches. If Accelerate has prepared it, it is changed in place.
    Returns:
        The loader to iterate over, and the `forge.data.resumable` that has its place.
    """
    if not is_prepared(loader):
        batches = forge.data.resumable(loader)
        return _Counted(loader, batches), batches
    inner = loader.base_dataloader
    for sampler in _seedable_samplers(loader):
        if sampler.generator is None:  # it would make one in its first pass, too late to restore
            sampler.generator = torch.Generator(device="cpu")
    batches = forge.data.resumable(inner, ahead=_AHEAD)
    loader.base_dataloader = _Counted(inner, batches, loader)
    return loader, batches


def problems(loader: Any, num_processes: int) -> list[str]:
    """Why a resume could not continue in a loader exactly."""
    if num_processes == 1 or not isinstance(loader, DataLoaderDispatcher):
        return []
    return [
        f"a {type(loader).__name__} sends batches from the first process to all {num_processes}"
        " (dispatch_batches), and completes the last batch of a pass with samples that a resumed"
        " job no longer has. Set dispatch_batches=False: then each process reads its own batches."
    ]


def _seedable_samplers(loader: Any) -> Iterator[Any]:
    """The samplers inside a loader whose order follows from their seed and the epoch."""
    one = loader.batch_sampler
    while one is not None:
        inner = getattr(one, "sampler", None)
        if isinstance(inner, SeedableRandomSampler):
            yield inner
        one = getattr(one, "batch_sampler", None)


class Passes:
    """The number of passes through a prepared loader, and the seeds of its samplers.

    Accelerate takes a seed from torch's initial seed, which can be another one in a resumed job.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The number and the seeds."""
        seeds = [one.initial_seed for one in _seedable_samplers(self._loader)]
        return {"iteration": self._loader.iteration, "seeds": seeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._loader.iteration = state["iteration"]
        for one, seed in zip(_seedable_samplers(self._loader), state["seeds"], strict=True):
            one.initial_seed = seed


class PreparedLoader:
    """A prepared loader for `run.steps` and `run.batches`, with its place as its state."""

    exact = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._passes = Passes(loader)
        self._is_inside = False
        """Whether the next pass is the rest of one that was saved before its end."""

    def is_of(self, loader: Any) -> bool:
        """Whether it reads this loader."""
        return self._loader is loader

    @cached_property
    def _batches(self) -> Any:
        """The batches that were counted; loaders that forge does not read stay as they are."""
        return read(self._loader)[1]

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        number, handed = self._loader.iteration, self._batches.taken
        types = getattr(self._loader, "rng_types", None)
        if self._is_inside:  # else the ranks' random states would be made equal once more
            self._loader.rng_types, self._is_inside = None, False
        try:
            for batch in self._loader:
                self._loader.rng_types = types
                handed += 1
                self._batches.pending = self._batches.taken - handed
                yield batch
            self._loader.iteration = number + 1  # also if no batch of the pass was left
        finally:
            self._loader.rng_types = types
            self._batches.end_pass(handed)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was given out."""
        return {"batches": self._batches.state_dict(), "passes": self._passes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self._batches.load_state_dict(state["batches"])
        self._passes.load_state_dict(state["passes"])
        self._is_inside = not state["batches"]["is_over"]
