"""The parts of a loader: those saved with its position, and those that are in no checkpoint.

`LoaderParts` saves samplers and generators. Each is saved twice: as it was at the start of the
epoch, to repeat the epoch's order, and as it is now, in case the loop has changed it. A loader with
a `state_dict` that is not known to contain its position counts as a part too.

`FixedParts` belong to classes of torch and forge that keep no state of their own, so the loop must
not change them. A resumed job builds them in the script; if the loop has changed them since, the
current pass cannot be repeated, and later passes have other batches. Contents of tensors and lists
are not compared: a change is another object, another length, or another version counter of a
tensor.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, Subset, SubsetRandomSampler, WeightedRandomSampler

from forge.checkpoint.format.encoding import fingerprint
from forge.compat import of_torch
from forge.data import loaders, seeding
from forge.data.sharing import GlobalBatchSampler
from forge.errors import CheckpointError, ConfigError, StateMismatch
from forge.state.adapters import read_state

_LOADER = "loader"
_EPOCH = ".epoch"


class LoaderParts:
    """The parts of one loader.

    Args:
        loader: Any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_checked = False
        """Whether a checkpoint can hold the states of the parts."""

    def state(self, *, is_place: bool) -> dict[str, Any]:
        """The parts' state.

        Args:
            is_place: Whether the loader's `state_dict` contains its position, and so its samplers.
        Raises:
            ConfigError: If a `state_dict` raises, or returns what no checkpoint can hold.
        """
        parts: dict[str, Any] = {}
        for name, one in {_LOADER: self._loader, **loaders.samplers(self._loader)}.items():
            generator = getattr(one, "generator", None)
            # First: `isinstance` of a Generator runs code of python's.
            if generator is not None and isinstance(generator, torch.Generator):
                parts[f"{name}.generator"] = generator.get_state()
            if is_place:
                continue
            if hasattr(one, "set_epoch") and isinstance(getattr(one, "epoch", None), int):
                parts[f"{name}{_EPOCH}"] = one.epoch
            if loaders.has_state(one):
                # A copy: the part can continue to change the list that it returned.
                parts[name] = copy.deepcopy(read_state(f"the {name}", one))
                if not self._is_checked:
                    _check(one, parts[name])
        self._is_checked = True
        return parts

    def restore(self, parts: dict[str, Any]) -> None:
        """Restore the parts.

        Raises:
            StateMismatch: If a part no longer exists.
        """
        owners = self._owners()
        for name, part in self._without_epochs(parts):
            if name not in owners:
                raise StateMismatch(
                    f"data: the checkpoint has the state of the loader's {name}, but the loader has"
                    f" no {name} now"
                )
            _restore(owners[name], part)

    def restore_present(self, parts: dict[str, Any]) -> None:
        """Restore what the loop has changed since the epoch began, such as a sampler's weights."""
        owners = self._owners()
        for name, part in self._without_epochs(parts):
            one = owners.get(name)
            is_generator = isinstance(one, torch.Generator)
            if one is None:
                continue
            if is_generator or fingerprint(one.state_dict()) != fingerprint(part):
                _restore(one, part)

    def _without_epochs(self, parts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Restore the epochs of the samplers; yields the other parts."""
        owners = self._owners()
        for name, part in parts.items():
            if name.endswith(_EPOCH):
                owner = owners.get(name.removesuffix(_EPOCH))
                if owner is not None:
                    owner.set_epoch(part)
            else:
                yield name, part

    def _owners(self) -> dict[str, Any]:
        samplers = loaders.samplers(self._loader)
        return {_LOADER: self._loader, **samplers, **loaders.generators(self._loader)}


def _check(owner: Any, state: Any) -> None:
    try:
        fingerprint(state)
    except CheckpointError as error:
        what = f"{type(owner).__name__}.state_dict(): {error}"
        raise ConfigError([what], "The data of this job") from error


def _restore(owner: Any, part: Any) -> None:
    if isinstance(owner, torch.Generator):
        owner.set_state(part)
    else:
        owner.load_state_dict(copy.deepcopy(part))


# -- parts that are in no checkpoint -----------------------------------------------------------

_NAMES: dict[type, tuple[str, ...]] = {
    BatchSampler: ("batch_size", "drop_last"),
    GlobalBatchSampler: ("global_batch_size", "batch_size", "drop_last"),
    WeightedRandomSampler: ("weights",),
    SubsetRandomSampler: ("indices",),
    Subset: ("indices",),
}
"""Attributes that only the script sets, by class."""

_PACKAGES = ("torch", "torchdata", "forge")
"""Only classes of these packages: a user's own sampler can change itself between epochs."""


class _Mark(NamedTuple):
    """The identity and size of a value, kept to detect a change."""

    value: Any
    length: int | None
    version: int | None

    def is_of(self, value: Any) -> bool:
        """Whether this is the mark of `value` as it is now; cheap enough for each boundary."""
        if type(value) in (int, bool):
            return bool(value == self.value)
        return value is self.value and self[1:] == (loaders.length(value), of_torch.version(value))


class FixedParts:
    """The fixed parts of all loaders that a loop reads."""

    def __init__(self) -> None:
        self._first: list[tuple[weakref.ref[Any], dict[str, _Mark]]] = []
        """Each part, and its values when the loop began."""
        self._changed: list[str] = []
        """Changes found when a loop was left; the next loop begins with the values at its start."""

    def watch(self, loader: Any) -> None:
        """Remember the parts of a loader, unless they are remembered already."""
        self._first = [(part, marks) for part, marks in self._first if part() is not None]
        known = {id(part()) for part, _ in self._first}
        for owner in _owners(loader):
            if id(owner) not in known:
                self._first.append((weakref.ref(owner), _marks(owner)))

    def begin_loop(self) -> None:
        """Remember all current values: code between two loops runs again when the job resumes."""
        self._first = [(part, _marks(part())) for part, _ in self._first]

    def end_loop(self) -> None:
        """Keep the changes that the loop has made."""
        self._changed = self._changes()

    def check(self) -> None:
        """Check, before a save, that nothing was changed.

        Raises:
            ConfigError: Names the changed parts.
        """
        if found := self._changes():
            problems = [
                f"{name} was changed inside the loop, but is not saved: a resumed job would use the"
                " value that the script sets, and get other batches. Set it before the loop. To"
                " change it between epochs, keep the value in `run.state`, and build the dataset,"
                " sampler and loader from it in the loop over `run.epochs`, before `run.batches`;"
                " or write your own sampler with state_dict and load_state_dict."
                for name in found
            ]
            raise ConfigError(problems, "The training loop")

    def _changes(self) -> list[str]:
        found = list(self._changed)
        for part, marks in self._first:
            owner = part()
            for name, mark in marks.items() if owner is not None else ():
                if not mark.is_of(getattr(owner, name, None)):
                    found.append(f"{type(owner).__name__}.{name}")
        return list(dict.fromkeys(found))


def _owners(loader: Any) -> Iterator[Any]:
    for sampler in loaders.samplers(loader).values():
        if type(sampler).__module__.partition(".")[0] in _PACKAGES:
            yield sampler
    yield from (one for one in seeding.within(getattr(loader, "dataset", None)) if _names(one))


def _names(owner: Any) -> tuple[str, ...]:
    return next((names for kind, names in _NAMES.items() if isinstance(owner, kind)), ())


def _marks(owner: Any) -> dict[str, _Mark]:
    return {name: _mark(getattr(owner, name, None)) for name in _names(owner)}


def _mark(value: Any) -> _Mark:
    return _Mark(value, loaders.length(value), of_torch.version(value))
