"""Resuming with a loader that has changed since the checkpoint was saved.

Inside an epoch a change is refused, unless another number of ranks, or another batch size, can
continue after the same sample. Between two epochs it is logged.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from forge import messages
from forge.data import loaders
from forge.data.properties import Properties
from forge.data.sharing import Sharing
from forge.errors import ConfigError, StateMismatch
from forge.state import rng

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

_ORDER = {
    "sampler": "the sampler",
    "length": "the length of its dataset",
    "shuffle": "the sampler's shuffle",
    "seed": "the sampler's seed",
}
"""The values on which an order depends, in addition to the epoch."""


def _changes(now: Properties, before: Properties) -> list[str]:
    """The changes since `before`, a phrase each."""
    is_same_kind = all(getattr(now, name) == getattr(before, name) for name in _KIND)
    names = _WORDS if is_same_kind else _KIND
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
    return [
        f"{_WORDS[name]} was {was!r} and is {found!r}"
        for name, (was, found) in pairs.items()
        if was != found and None not in (was, found)
    ]


def name_changes(now: Properties, before: Properties) -> None:
    """Log the changes of a loader that is between two passes."""
    _say(now, _changes(now, before))
    name_workers(now, before)


def _say(now: Properties, changes: list[str]) -> None:
    if changes:
        messages.warn(
            f"The loader ({now.name}) has changed since the checkpoint was saved:"
            f" {'; '.join(changes)}. The checkpoint is between two passes, so the job resumes"
            " with the loader as it is now"
        )


def name_workers(now: Properties, before: Properties) -> None:
    """Log that random draws in samples can differ."""
    was, count = before.drawing_workers, now.drawing_workers
    if was != count and None not in (was, count):
        messages.warn(
            f"The loader ({now.name}) had {was} workers when the checkpoint was saved, and has"
            f" {count} now: random draws in samples differ from those of an uninterrupted run."
            " With forge.data.seeded(dataset, seed) they depend only on (seed, epoch, index),"
            " with any number of workers"
        )


def batches_to_skip(now: Properties, taken: int, before: Properties) -> int:
    """Number of batches to skip in an epoch of which `taken` were taken before.

    Raises:
        ConfigError: Names the changes, which would give other batches.
    """
    found = _changes(now, before)
    if not found:
        return taken
    if taken == before.batches and now.batches is not None and not now.is_stateful:
        _say(now, found)
        return now.batches  # the end of the epoch stays the end
    problem = (
        f"the checkpoint was saved after {taken} batches of a pass, and the loader"
        f" ({now.name}) has changed since: {'; '.join(found)}. The rest of the pass would have"
        " other batches. Build the loader as before, or start in a new directory."
    )
    raise ConfigError([problem], "The data of this resume")


# -- another number of ranks, or batch size ------------------------------------------------------


def moved(now: Sharing, taken: int, before: Sharing) -> int:
    """Number of batches to skip for `taken` batches that were shared as in `before`.

    Raises:
        StateMismatch: If samples would be used twice, or never.
    """
    is_unknown = bool(now.unknown and before.unknown)
    if now == before or (is_unknown and now.num_ranks == before.num_ranks):
        return taken
    if taken == before.num_batches and now.num_batches is not None:
        return now.num_batches
    if now.unknown or before.unknown:
        raise StateMismatch(_refusal(now, before))
    for name, words in _ORDER.items():
        if before.order[name] != now.order[name]:
            raise StateMismatch(
                f"data: {words} was {before.order[name]!r} when the checkpoint was saved inside"
                f" an epoch, but is {now.order[name]!r} now. The rest of the epoch would have"
                " other samples. Restore the old value, or start in a new directory"
            )
    num_samples = taken * before.global_batch_size
    if num_samples % now.global_batch_size:
        raise StateMismatch(
            f"data: the checkpoint was saved after {num_samples} samples of an epoch (global"
            f" batch size {before.global_batch_size}), which is not a multiple of the present"
            f" global batch size, {now.global_batch_size}. Choose the number of"
            f" ranks and the batch size of a rank so that their product divides {num_samples}"
        )
    return num_samples // now.global_batch_size


def check_between_epochs(now: Sharing, before: Sharing, state: dict[str, Any]) -> None:
    """Check that state kept by one rank is not loaded into the others.

    Raises:
        StateMismatch: If a loader of unknown order has kept state.
    """
    has_kept = "loader" in state or state["parts"].keys() - {"counters"}
    if now.num_ranks != before.num_ranks and now.unknown and has_kept:
        raise StateMismatch(_refusal(now, before))


def _refusal(now: Sharing, before: Sharing) -> str:
    expected, found = (one.unknown or one.order["sampler"] for one in (before, now))
    return (
        f"data: the checkpoint was saved by {_ranks(before.num_ranks)} ({expected}), but this"
        f" job has {_ranks(now.num_ranks)} ({found}). forge can divide the remaining samples"
        " among the ranks again only for a DataLoader whose sampler is a"
        " torch.utils.data.DistributedSampler, or whose batch_sampler is a"
        " forge.data.GlobalBatchSampler. Start the job with the number of ranks and the loader"
        " of the checkpoint, or in a new directory with one of these samplers"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def draw_apart(loader: Any, rank: int) -> None:
    """Give a rank that loaded the random state of rank 0 a different one, the same each time.

    Otherwise the workers of all ranks would draw the same numbers.
    """
    if getattr(loader, "num_workers", 0) and not loaders.is_seeded(loader):
        messages.warn(
            "The number of ranks has changed inside an epoch: random draws in the loader's workers"
            " differ from those of an uninterrupted run. With forge.data.seeded(dataset, seed) they"
            " depend only on (seed, epoch, index), with any number of ranks"
        )
    if rank == 0:
        return
    for one in (*loaders.generators(loader).values(), torch.default_generator):
        drawn = int(torch.randint(2**62, (), generator=one, device=one.device))
        digest = hashlib.blake2b(f"{drawn},{rank}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        if one is torch.default_generator:
            rng.seed_cpu(seed)
        else:
            one.manual_seed(seed)
