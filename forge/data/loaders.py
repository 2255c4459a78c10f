"""The parts of a loader, and the reasons why a resume could repeat its batches inexactly.

Many loaders have a `state_dict` without their position, for example with the generator they shuffle
with. Loading such a state does not restore the position, and the pass would start from its first
batch. Two batches show it: a position differs after each. Until then, a `Proof` says that a resume
iterates from the start of the pass.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from forge import messages
from forge.checkpoint.format.encoding import fingerprint
from forge.data import seeding
from forge.errors import CheckpointError, ConfigError
from forge.state import rng
from forge.state.adapters import read_state

_Seen = TypeVar("_Seen")

_KNOWN = ("torch", "torchdata")
"""Datasets and samplers whose order is drawn at the start of an epoch, or from a saved generator.

Only these exact classes: a subclass can behave differently.
"""
_KNOWN_SAMPLERS = (*_KNOWN, "accelerate", "transformers")


class FirstSeen(Generic[_Seen]):
    """The value that was first seen of each object, for as long as the object lives.

    By identity: a tensor given as a loader compares with `==` element by element.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, _Seen] = {}

    def of(self, one: Any, now: _Seen) -> _Seen:
        """The first `now`; TypeError if `one` cannot be weakly referenced, for example a list."""
        if id(one) not in self._by_id:
            weakref.finalize(one, self._by_id.pop, id(one), None).atexit = False
            self._by_id[id(one)] = now
        return self._by_id[id(one)]


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


_first: FirstSeen[dict[str, int]] = FirstSeen()
"""Integers and flags among an object's attributes, at the first call."""


def counters(one: Any) -> dict[str, int]:
    """Attributes that count, for example epochs: those that have changed since the first call.

    An object without `state_dict` does not expose any other state.
    """
    now = _numbers(one)
    try:
        first = _first.of(one, now)
    except TypeError:  # for example a list
        return {}
    return {} if now == first else {name: n for name, n in now.items() if first.get(name) != n}


def restore_counters(one: Any, saved: dict[str, int]) -> None:
    """Restore the counters; a counter that was not saved gets its first value."""
    changed = counters(one)
    first = _first.of(one, {}) if changed else {}
    back = {name: first[name] for name in changed if name in first}
    for name, value in (back | saved).items():
        setattr(one, name, value)


def _numbers(one: Any) -> dict[str, int]:
    return {name: value for name, value in vars(one).items() if type(value) in (int, bool)}


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


def inexact(loader: Any) -> Iterator[str]:
    """Reasons why a resume could be inexact, one or more sentences each."""
    name = type(loader).__name__
    is_stateful, is_dataloader = has_state(loader), isinstance(loader, DataLoader)
    workers = getattr(loader, "num_workers", 0)
    unseeded = workers > 0 and not is_seeded(loader)
    seeds = _seeds(loader) if unseeded else ""
    goes_there = "Give the loader a state_dict that contains its position in the pass"
    if is_stateful and unseeded:
        yield (
            f"the state of the random generators in the {workers} workers of the {name} is not"
            f" saved. {seeds}"
        )
    if is_dataloader and not is_stateful:
        if unseeded and loader.persistent_workers:
            yield (
                f"the random generators in the persistent workers of the {name} are not reset when"
                f" an epoch begins, and their state is not saved. {seeds}"
            )
        if isinstance(loader.dataset, IterableDataset):
            yield (
                f"a resumed job reads the dataset ({type(loader.dataset).__name__}) again from the"
                " start of the epoch, and skips the batches already trained on. This is exact only"
                f" if the dataset yields the same samples each time. {goes_there}, as"
                " torchdata.StatefulDataLoader has."
            )
        if has_own_iter(loader):
            yield (
                f"the {name} has its own __iter__, which a resumed job calls again at the start of"
                " the epoch; the batches already trained on are skipped. This is exact only if"
                f" __iter__ yields the same batches each time. {goes_there}."
            )
    for one, remedy in _private_generators(loader):
        yield (
            f"the {type(one).__name__} has its own random generator"
            f" ({', '.join(seeding.own_generators(one))}), which is not saved. {remedy}"
        )
    for one in _unknown_samplers(loader):
        yield (
            f"a resumed job iterates the {type(one).__name__} again from the start of the epoch."
            " This gives the same order only if the whole order is drawn when an epoch starts, and"
            f" does not depend on earlier epochs. Otherwise give the {type(one).__name__} one of"
            " these: state_dict and load_state_dict; set_epoch(epoch), if the epoch determines the"
            " order; or an attribute `generator` from which the order is drawn."
        )
    if is_dataloader and not is_stateful and workers > 1 and not getattr(loader, "in_order", True):
        yield (
            f"the {name} has in_order=False, so the order of batches depends on which worker is"
            " faster."
        )
    if not (is_stateful or is_dataloader or isinstance(loader, Sequence)):
        yield (
            f"the loader ({name}) has no state_dict, so a resumed job iterates it again from the"
            " start of the epoch, and skips the batches already trained on. This is exact only if"
            f" the loader yields the same batches each time. {goes_there}."
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
    has_order = has_state(sampler) or hasattr(sampler, "set_epoch")
    return has_order or f"{name}.generator" in generators(loader)


def _private_generators(loader: Any) -> Iterator[tuple[Any, str]]:
    for name, sampler in samplers(loader).items():
        if not _is_named(name, sampler, loader) and _draws_for_itself(sampler):
            yield sampler, "Give it state_dict and load_state_dict, or a `generator`."
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


class Kind(Enum):
    """Whether the loader or forge restores its position."""

    stateful = "stateful"
    """The loader, by its `state_dict`."""
    unproven = "unproven"
    """Perhaps the loader: unknown until its first two batches."""
    replayed = "replayed"
    """forge, which counts the batches."""


class Proof:
    """The finding for one loader.

    Args:
        loader: Any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.kind = Kind.unproven if has_state(loader) else Kind.replayed
        if self.kind is Kind.unproven and is_known_state(loader):
            self.kind = Kind.stateful
        self.is_open = self.kind is not Kind.replayed
        """Whether to read the loader's state after the next batch."""
        self._before: str | None = None
        """Fingerprint of the state before the first batch; None: it could not be read."""
        self._last: str | None = None
        """Fingerprint of the state after the last batch."""

    def begin_pass(self, random_state: dict[str, Any]) -> Any:
        """Read the state before the first batch, unless the finding is known already.

        Args:
            random_state: Restored afterwards: reading the state can make an iterator, which draws.
        Returns:
            The state; None if there is none.
        """
        if self.kind is not Kind.unproven or self._last is not None:
            return None
        try:
            state = copy.deepcopy(self._loader.state_dict())
        except Exception:  # noqa: BLE001 - many can say it only once there is an iterator
            return None
        finally:
            rng.restore(random_state)
        self._before = self._fingerprint(state)
        return state

    def again(self, taken: int, before: Any) -> None:
        """Continue after a new process has taken the first batches again."""
        self._before = self._fingerprint(before) if before is not None else None
        self._last = self._fingerprint(self._loader.state_dict()) if taken == 1 else None

    def check_batch(self, name: str, taken: int) -> None:
        """Read the state after a batch.

        Args:
            name: Name of the loader, for messages.
            taken: Batches taken in the pass.
        Raises:
            ConfigError: If the loader raises.
        """
        state = read_state(name, self._loader)
        if self.kind is Kind.unproven:
            now = self._fingerprint(state)
            if taken == 1:
                self._last = now
                return
            if self._last in (now, self._before):
                self.demote(name)
        self.accept()
        self.is_open = False

    def _fingerprint(self, state: Any) -> Any:
        try:
            return fingerprint(state)
        except CheckpointError as error:
            what = f"{type(self._loader).__name__}.state_dict(): {error}"
            raise ConfigError([what], "The data of this job") from error

    def accept(self) -> None:
        """Accept the state as the position, because nothing contradicts it."""
        if self.kind is Kind.unproven:
            self.kind = Kind.stateful

    def demote(self, name: str) -> None:
        """Stop using the state as the position, and warn."""
        self.kind, self.is_open = Kind.replayed, False
        messages.warn(
            f"{name}: {type(self._loader).__name__}.state_dict() is the same before and after a"
            " batch, so it does not contain the position of the loader. A resumed job reads the"
            " loader again from the start of the pass and skips the batches already used: this is"
            " exact only if the loader then yields the same batches. To save the position, count"
            " each batch in state_dict() before the loader returns it"
        )
