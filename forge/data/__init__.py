"""The position in the data, saved for every kind of loader; reproducible random augmentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from forge.data.seeding import seeded
from forge.data.sharing import GlobalBatchSampler

if TYPE_CHECKING:
    from forge.data.pushed import Resumable

__all__ = ["GlobalBatchSampler", "resumable", "seeded"]

_Batch = TypeVar("_Batch")


def resumable(loader: Iterable[_Batch], *, ahead: int = 0) -> Resumable[_Batch]:
    """Wrap a loader so that its place in the data is saved, to the batch, in any loop.

    For a loop that forge does not own, such as a trainer's, and for a second loader in a loop over
    `run.epochs`. Give it to `forge.Run` like a model; without a Run, save its `state_dict()`, and
    restore torch's random state when you load it.

    Example::

        loader = forge.data.resumable(DataLoader(dataset, shuffle=True))
        with forge.Run(policy, model=model, optimizer=optimizer, loader=loader) as run:
            trainer.fit(model, loader)  # calls run.boundary between two steps

    A batch that the loop has taken counts as trained on, and `run.boundary` refuses a loop that has
    trained on fewer, except for the last `ahead` batches.

    A loop that reads several loaders gives `forge.Run` one object with `state_dict` and
    `load_state_dict`, which has the places of all of them. If the object lists them in an attribute
    `resumables`, forge says at the start what of them a resume cannot repeat.

    Args:
        loader: A DataLoader, StatefulDataLoader, or any iterable of batches.
        ahead: Number of batches that the loop reads ahead. A resumed job reads the last ones again,
            with the random state that they were read with.
    Returns:
        An iterable of the same batches, with `len()` if the loader has it. If it is resumed inside
        a pass, its first iteration yields what is left of that pass.
    """
    from forge.data.pushed import Resumable  # loops over run.steps or run.epochs need none

    return Resumable(loader, ahead)
