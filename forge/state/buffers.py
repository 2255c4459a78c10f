"""Buffers that appear or grow while a model is used: loading creates them as they were saved.

A checkpoint records the shape that the script had built for each buffer that has changed since.
Only a buffer that this script builds with the recorded shape is changed; any other difference is
not growth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forge.checkpoint.load.outline import UNKNOWN
from forge.compat import of_torch
from forge.state.module_state import describe, own_ways

Built = dict[str, str | None]
"""Key in the state -> dtype and shape; None for a buffer that is None."""


def built(module: torch.nn.Module) -> Built:
    """The buffers of a module that are in its state."""
    return {key: None if one is None else describe(one) for key, one in _buffers(module)}


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for path, one in module.named_modules(remove_duplicate=False):
        for name, buffer in of_torch.persistent_buffers(one).items():
            yield f"{path}.{name}" if path else name, buffer


def changed(first: Built, now: Built) -> Built:
    """The originally built dtype and shape of the buffers that have changed since."""
    keys = [key for key in now if first.get(key) != now[key]]
    return {key: first.get(key) for key in keys}


def targets(
    module: torch.nn.Module, first: Built, state: Mapping[str, Any], recorded: Built
) -> dict[str, Any]:
    """The dtype and shape that buffers need before a state is loaded, by key; None: set to None.

    Args:
        first: The buffers as this script has built them.
        state: The saved state of the module.
        recorded: The result of `changed` at the save.
    """
    now, paths = dict(_buffers(module)), {p for p, _ in module.named_modules()}
    own = own_ways(module)
    found: dict[str, Any] = {}
    for key in {**now, **recorded}:
        leaf, live = state.get(key), now.get(key)
        wanted = None if leaf is None else describe(leaf)
        is_left = leaf is UNKNOWN or (own and key.startswith(own))
        if is_left or wanted == (None if live is None else describe(live)):
            continue
        # A buffer that is not recorded was saved as built: it has changed in this process.
        saved_as_built = recorded.get(key, wanted)
        if saved_as_built == first.get(key) and key.rpartition(".")[0] in paths:
            found[key] = leaf
    return found


def fit(module: torch.nn.Module, first: Built, wanted: Mapping[str, Any]) -> None:
    """Give buffers the shapes of the state that is loaded next.

    Args:
        first: The buffers as this script has built them.
        wanted: The result of `targets`.
    """
    made: dict[int, torch.Tensor] = {}  # one saved tensor becomes one tensor again
    for key, leaf in wanted.items():
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        live = of_torch.persistent_buffers(owner).get(name)
        device = leaf.device if live is None and leaf is not None else getattr(live, "device", None)
        new = None
        if leaf is not None:
            new = made.setdefault(id(leaf), torch.empty_like(leaf, device=device))
        if name in of_torch.persistent_buffers(owner):
            setattr(owner, name, new)
        else:
            vars(owner).pop(name, None)  # was None until the first call, so not a buffer yet
            owner.register_buffer(name, new)
        if new is None and key not in first:
            delattr(owner, name)
