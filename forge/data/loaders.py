"""The parts of a loader, and the list of exact kinds: loaders that a resume repeats exactly.

These are a DataLoader with a sampler of torch or one that has `set_epoch`, torchdata's
StatefulDataLoader, lists and other iterables that yield the same batches again, and objects with a
`state_dict` that say by `exact = True` that it restores their place. Any other is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from forge.data import seeding

_KNOWN = ("torch", "torchdata")
"""Datasets and samplers whose order is drawn at the start of an epoch, or from a saved generator.

Only these exact classes: a subclass can behave differently.
"""
_KNOWN_SAMPLERS = (*_KNOWN, "accelerate", "transformers")


def has_state(one: Any) -> bool:
    """Whether an object has a `state_dict` and can be restored from it.

    Accelerate's loaders always have the methods, but a state only if an attribute says so.
    """
    is_asked = getattr(one, "use_stateful_dataloader", True)
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict") and bool(is_asked)


def is_known_state(loader: Any) -> bool:
    """Whether the `state_dict` of a loader is torchdata's, which contains its position."""
    module = getattr(getattr(type(loader), "state_dict", None), "__module__", None) or ""
    return module.partition(".")[0] in _KNOWN


def keeps_place(loader: Any) -> bool:
    """Whether a loader restores its place in the data itself."""
    return has_state(loader) and (is_exact(loader) or is_known_state(loader))


def is_exact(one: Any) -> bool:
    """Whether the class of a loader or sampler says that its `state_dict` restores its place."""
    return getattr(one, "exact", False) is True


def samplers(loader: Any) -> dict[str, Any]:
    """The samplers of a DataLoader, by attribute path, also those inside other batch samplers."""
    if not isinstance(loader, DataLoader):
        return {}
    found: dict[str, Any] = {"sampler": loader.sampler}
    path, one = "batch_sampler", loader.batch_sampler
    while one is not None and not any(one is known for known in found.values()):
        found[path] = one
        inner = getattr(one, "sampler", None)
        if not any(inner is known for known in found.values()):
            found[f"{path}.sampler"] = inner
        path, one = f"{path}.batch_sampler", getattr(one, "batch_sampler", None)
    return {name: sampler for name, sampler in found.items() if sampler is not None}


SAME_ORDER = (
    "A sampler has the same epoch ({epoch}) in two passes, so both have the same order of samples."
    " Call sampler.set_epoch(epoch) before each pass; forge calls it only in a loop over run.steps."
)


def shuffling_epoch(loader: Any) -> int | None:
    """The epoch from which a sampler, such as a DistributedSampler, draws the order of a pass."""
    for sampler in samplers(loader).values():
        if hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", False):
            return getattr(sampler, "epoch", None)
    return None


def generators(loader: Any) -> dict[str, torch.Generator]:
    """The generators that were passed to a loader and to its samplers."""
    owners = {"loader": loader, **samplers(loader)}
    found = {f"{name}.generator": getattr(one, "generator", None) for name, one in owners.items()}
    return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}


def has_own_iter(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader's subclass has its own `__iter__`."""
    return type(loader).__iter__ is not DataLoader.__iter__


def num_batches(loader: Any) -> int | None:
    """Number of batches in an epoch, if the loader has a length.

    None for an iterable dataset: its length is a guess, and torch warns if it yields more.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    return length(loader)


def length(one: Any) -> int | None:
    """Its length; None if it has none."""
    try:
        return len(one)
    except Exception:  # noqa: BLE001 - whatever it raises, it does not say
        return None


def is_seeded(loader: Any) -> bool:
    """Whether all random draws of workers depend only on a batch's indices."""
    collate = getattr(loader, "collate_fn", None)
    dataset = getattr(loader, "dataset", None)
    return seeding.is_seeded(dataset) and not seeding.own_generators(collate)


_EXACT = "give it a state_dict and load_state_dict that restore its place, and `exact = True`"


def doubts(loader: Any) -> Iterator[str]:
    """Kinds of a loader and its parts that are not in the list, each with the remedy."""
    name, dataset = type(loader).__name__, getattr(loader, "dataset", None)
    is_dataloader, workers = isinstance(loader, DataLoader), getattr(loader, "num_workers", 0)
    # Workers of a loader that is read again draw the same numbers, if each pass starts new ones.
    is_lasting = has_state(loader) or (is_dataloader and loader.persistent_workers)
    if workers and is_lasting and not is_seeded(loader):
        yield f"random draws in the {workers} workers of the {name}. {_seeds(loader)}"
    is_other = has_state(loader) or isinstance(loader, Iterator)
    if keeps_place(loader):
        pass
    elif is_other or (is_dataloader and has_own_iter(loader)):
        yield f"a {name}: {_EXACT}"
    elif is_dataloader and isinstance(dataset, IterableDataset):
        yield (
            f"a {name} over samples of a {type(dataset).__name__}: use torchdata's"
            f" StatefulDataLoader, or {_EXACT}"
        )
    elif is_dataloader and workers > 1 and not getattr(loader, "in_order", True):
        yield f"a {name} with in_order=False: leave that out"
    for one, remedy in _private_generators(loader):
        names = ", ".join(seeding.own_generators(one))
        yield f"the random generator of the {type(one).__name__} ({names}). {remedy}"
    for one in _unknown_samplers(loader):
        yield (
            f"the order of a {type(one).__name__}: give it set_epoch(epoch), an attribute"
            f" `generator` from which it draws its order, or {_EXACT}"
        )


def _seeds(loader: Any) -> str:
    """The advice that makes the random draws of a loader's workers repeatable."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    own = [n for one in (*seeding.within(dataset), collate) for n in seeding.own_generators(one)]
    is_wrapped = any(isinstance(one, seeding.SeededDataset) for one in seeding.within(dataset))
    wrap = "" if is_wrapped else "Wrap the dataset in forge.data.seeded."
    reach = f"{seeding.not_seeded(own)}. {seeding.OTHER_GENERATORS}"
    return " ".join(filter(None, (wrap, reach if own else "")))


def _is_named(name: str, sampler: Any, loader: Any) -> bool:
    """Whether a sampler's order follows from its saved state, or from the epoch."""
    is_kept = has_state(sampler) and is_exact(sampler)
    has_order = is_kept or hasattr(sampler, "set_epoch")
    return has_order or f"{name}.generator" in generators(loader)


def _private_generators(loader: Any) -> Iterator[tuple[Any, str]]:
    for name, sampler in samplers(loader).items():
        if not _is_named(name, sampler, loader) and _draws_for_itself(sampler):
            yield sampler, f"Give it a `generator` that is torch's, or {_EXACT}"
    if getattr(loader, "num_workers", 0) == 0:
        collate = getattr(loader, "collate_fn", None)
        for one in (*seeding.within(getattr(loader, "dataset", None)), collate):
            if seeding.own_generators(one):
                yield one, seeding.OTHER_GENERATORS


def _draws_for_itself(sampler: Any) -> bool:
    return bool(seeding.own_generators(sampler, max_depth=1))  # one inside is looked at by itself


def _unknown_samplers(loader: Any) -> Iterator[Any]:
    for name, sampler in samplers(loader).items():
        package = type(sampler).__module__.partition(".")[0]
        is_known = package in _KNOWN_SAMPLERS or isinstance(sampler, Sequence)
        is_told = _is_named(name, sampler, loader) or _draws_for_itself(sampler)
        if not (is_known or is_told):
            yield sampler
