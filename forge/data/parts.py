"""The parts of a loader that are saved with its position: samplers, generators, counters.

Each is saved twice: as it was at the start of the epoch, to repeat the epoch's order, and as it is
now, in case the loop has changed it. A loader whose `state_dict` does not contain its position
counts as a part too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from forge.checkpoint.format.codec import fingerprint
from forge.data import loaders
from forge.errors import StateMismatch

_COUNTERS = "counters"
LOADER = "loader"


class LoaderParts:
    """The parts of one loader.

    Args:
        loader: Any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        for one in self._countable().values():
            loaders.counters(one)

    def state(self, *, is_place: bool) -> dict[str, Any]:
        """The parts' state.

        Args:
            is_place: Whether the loader's `state_dict` contains its position, and so its samplers.
        """
        parts: dict[str, Any] = {}
        counted: dict[str, dict[str, int]] = {}
        for name, one in {LOADER: self._loader, **loaders.samplers(self._loader)}.items():
            generator = getattr(one, "generator", None)
            # First: `isinstance` of a Generator runs code of python's.
            if generator is not None and isinstance(generator, torch.Generator):
                parts[f"{name}.generator"] = generator.get_state()
            if is_place:
                continue
            if loaders.has_state(one):
                # A copy: the part can continue to change the list that it returned.
                parts[name] = copy.deepcopy(one.state_dict())
            elif hasattr(one, "__dict__"):
                counted[name] = loaders.counters(one)
        if not is_place:  # else its `load_state_dict` is all that may change them
            parts[_COUNTERS] = counted
        return parts

    def restore(self, parts: dict[str, Any]) -> None:
        """Restore the parts.

        Raises:
            StateMismatch: If a part no longer exists.
        """
        owners = self._owners()
        self._restore_counters(parts)
        for name, part in _without_counters(parts):
            if name not in owners:
                raise StateMismatch(
                    f"data: the checkpoint has the state of the loader's {name}, but the loader has"
                    f" no {name} now"
                )
            _restore(owners[name], part)

    def restore_present(self, parts: dict[str, Any]) -> None:
        """Restore what the loop has changed since the epoch began, such as a sampler's weights."""
        owners = self._owners()
        self._restore_counters(parts)
        for name, part in _without_counters(parts):
            one = owners.get(name)
            is_generator = isinstance(one, torch.Generator)
            if one is None:
                continue
            if is_generator or fingerprint(one.state_dict()) != fingerprint(part):
                _restore(one, part)

    def _owners(self) -> dict[str, Any]:
        samplers = loaders.samplers(self._loader)
        return {LOADER: self._loader, **samplers, **loaders.generators(self._loader)}

    def _restore_counters(self, parts: dict[str, Any]) -> None:
        for name, one in self._countable().items() if _COUNTERS in parts else ():
            loaders.restore_counters(one, parts[_COUNTERS].get(name, {}))

    def _countable(self) -> dict[str, Any]:
        """The loader and its samplers without a `state_dict`, whose attributes are their state."""
        owners = {LOADER: self._loader, **loaders.samplers(self._loader)}
        return {
            name: one
            for name, one in owners.items()
            if hasattr(one, "__dict__") and not loaders.has_state(one)
        }


def _without_counters(parts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in parts.items() if name != _COUNTERS)


def _restore(owner: Any, part: Any) -> None:
    if isinstance(owner, torch.Generator):
        owner.set_state(part)
    else:
        owner.load_state_dict(copy.deepcopy(part))
