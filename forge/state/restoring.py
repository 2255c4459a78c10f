"""Restoring the objects given to a run: a captured state is compared with them, then loaded.

`StateRegistry.capture` (`registry.py`) captured it. `in_place_targets` comes first: the tensors of
the state are then read into live ones, and `load` restores the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from forge.checkpoint.format import shards
from forge.checkpoint.format.encoding import UNKNOWN
from forge.checkpoint.format.shards import Like
from forge.compat import of_torch
from forge.errors import StateMismatch
from forge.group.collectives import num_ranks
from forge.state import (
    adapters,
    module_state,
    optimizer_state,
    structure,
)
from forge.state.adapters import Stateful
from forge.state.module_state import describe, mismatch
from forge.state.optimizer_state import TensorCopies
from forge.state.registry import DROPOUTS, StateRegistry

_SHOWN = 8
"""Number of differences that one error lists."""


def in_place_targets(
    registry: StateRegistry, saved: dict[str, Any]
) -> list[tuple[Any, torch.Tensor | Like]]:
    """The live tensors that loading would copy the leaves of a captured state to.

    Only for objects that torch itself loads: another class can do anything. A leaf that must
    be sharded comes with a live tensor that is sharded in the same way.

    Args:
        saved: Can contain tensors without data, and `UNKNOWN`.
    Raises:
        StateMismatch: Like `load`.
    """
    check(registry, saved)
    found: list[tuple[Any, torch.Tensor | Like]] = list(shardings(registry, saved))
    for name, one in registry.objects.items():
        if isinstance(one, torch.nn.Module):
            found += _module_targets(one, saved["states"][name])
        elif isinstance(one, torch.optim.Optimizer):
            found += optimizer_state.in_place_targets(one, saved["states"][name])
    return found


def shardings(registry: StateRegistry, saved: dict[str, Any]) -> Iterator[tuple[Any, Like]]:
    """Leaves of a captured state that must be sharded like live tensors."""
    named = dict(registry.named_parameters())
    if not any(map(shards.is_sharded, named.values())):
        return
    for name, leaf in saved["grads"].items():
        if shards.is_sharded(named.get(name)):
            yield leaf, Like(named[name])
    for name, one in registry.objects.items():
        if isinstance(one, torch.optim.Optimizer):
            yield from optimizer_state.shardings(one, saved["states"][name])
        else:
            live = one.state_dict()
            for leaf, tensor in optimizer_state.pairs(saved["states"][name], live):
                is_alike = getattr(leaf, "shape", None) == tensor.shape
                if shards.is_sharded(tensor) and is_alike:
                    yield leaf, Like(tensor)


def check(registry: StateRegistry, saved: dict[str, Any]) -> None:
    """Compare a captured state with the objects, as far as possible before loading.

    Raises:
        StateMismatch: Names each leaf that differs.
    """
    refuse(_differences(registry, saved))


def prepare(registry: StateRegistry, saved: dict[str, Any]) -> None:
    """Prepare the objects before tensors of a captured state are read into live ones."""
    if num_ranks() > 1:
        from forge.state import ddp_buckets

        ddp_buckets.restore(registry.objects, saved.get("buckets", {}))


def load(
    registry: StateRegistry, saved: dict[str, Any], owned: Collection[int] = frozenset()
) -> None:
    """Restore a captured state; compares first, so that a mismatch changes nothing.

    Modules with their own loading method are compared afterwards.

    Args:
        owned: The `id` of tensors that can become part of the live objects; others are
            copied.
    Raises:
        StateMismatch: Names each leaf that differs.
    """
    check(registry, saved)
    copies = TensorCopies(owned, _known(registry, saved))
    for name in registry.objects:
        put(registry, name, saved["states"][name], copies)
    _load_gradients(registry, saved, copies)
    _load_modes(registry, saved)
    refuse(_late_differences(registry, saved))


def put(registry: StateRegistry, name: str, state: dict[str, Any], copies: TensorCopies) -> None:
    """Restore one object's state.

    Raises:
        StateMismatch: If the object itself refuses the state.
    """
    one = registry.objects[name]
    try:
        if isinstance(one, torch.optim.Optimizer):
            optimizer_state.load(one, state, copies)
        else:
            one.load_state_dict(state)
    except Exception as error:  # the object can be the user's own
        raise StateMismatch(
            f"{name}: {adapters.class_name(one)}.load_state_dict failed: {error}"
        ) from error


def _known(registry: StateRegistry, saved: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Leaves of modules and their live tensors, which an optimizer can refer to as well."""
    return {
        id(leaf): live
        for name, one in registry.objects.items()
        if isinstance(one, torch.nn.Module)
        for leaf, live in _module_targets(one, saved["states"][name])
    }


def _load_gradients(registry: StateRegistry, saved: dict[str, Any], copies: TensorCopies) -> None:
    frozen, gradients = set(saved["frozen"]), dict(saved["grads"])
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in registry.named_parameters():
        names.setdefault(parameter, []).append(name)
    for parameter, known_as in names.items():
        # The name under which a shared parameter was saved depends on the objects' order.
        parameter.requires_grad_(frozen.isdisjoint(known_as))
        found = [gradients.pop(name) for name in known_as if name in gradients]
        parameter.grad = copies.of(found[0], parameter.device) if found else None
    refuse(
        f"{name}: its gradient is in the checkpoint, but no object has such a parameter"
        for name in gradients
    )


def _load_modes(registry: StateRegistry, saved: dict[str, Any]) -> None:
    """Restore attributes that no `state_dict` contains, such as `training`."""
    evaluating, dropout = set(saved.get("evaluating", ())), saved.get("dropout", {})
    for name, one in registry.modules():
        one.training = name not in evaluating
        if name in dropout and isinstance(one, DROPOUTS):
            one.p = dropout[name]


def _differences(registry: StateRegistry, saved: dict[str, Any]) -> Iterator[str]:
    for name in sorted(registry.objects.keys() | saved["states"].keys()):
        if name not in saved["states"]:
            yield f"{name}: was given to forge.Run, but is not in the checkpoint"
        elif name not in registry.objects:
            yield f"{name}: is in the checkpoint, but was not given to forge.Run"
        else:
            yield from _object_differences(registry, name, registry.objects[name], saved)


def _object_differences(
    registry: StateRegistry, name: str, one: Stateful, saved: dict[str, Any]
) -> Iterator[str]:
    state = saved["states"][name]
    adapters.check(one, state)
    kind = adapters.of_main(saved["kinds"].get(name, adapters.class_name(one)))
    if isinstance(one, torch.nn.Module):
        own = module_state.own_ways(one)
        yield from _leaf_differences(name, one.state_dict(), state, own)
    elif kind != adapters.class_name(one):
        yield (
            f"{name}: the checkpoint has the state of a {kind}, but forge.Run was given a"
            f" {adapters.class_name(one)}"
        )
    elif isinstance(one, torch.optim.Optimizer):
        order = saved["order"].get(name, [])
        is_in_order = True
        for place, was, found in structure.order_differences(
            structure.orders(registry.objects)[name], order
        ):
            is_in_order = False
            yield (
                f"{mismatch(f'{name}.{place}', found, was)}."
                " Parameters must have the same order at every start: if they are collected in"
                " a Python set, sort them"
            )
        if is_in_order:
            yield from optimizer_state.differences(name, one, state)


def _late_differences(registry: StateRegistry, saved: dict[str, Any]) -> Iterator[str]:
    """Differences of modules that load in their own way, which are compared after loading."""
    for name, one in registry.objects.items():
        if isinstance(one, torch.nn.Module) and module_state.own_ways(one):
            yield from _leaf_differences(name, one.state_dict(), saved["states"][name])


# -- modules ------------------------------------------------------------------------------------


def _leaf_differences(
    name: str, live: Mapping[str, Any], saved: Mapping[str, Any], own: tuple[str, ...] = ()
) -> Iterator[str]:
    """A sentence for each leaf that is missing, unexpected or of another kind.

    Args:
        own: Prefixes of keys that are not compared.
    """
    for key in [*live, *(k for k in saved if k not in live)]:
        leaf = f"{name}.{key}"
        if own and str(key).startswith(own):
            continue
        if key not in saved:
            yield mismatch(leaf, "nothing", describe(live[key]))
        elif key not in live:
            yield mismatch(leaf, describe(saved[key]), "nothing")
        elif key.rpartition(".")[2] != of_torch.EXTRA_STATE and _differ(live[key], saved[key]):
            yield mismatch(leaf, describe(saved[key]), describe(live[key]))


def _differ(live: Any, saved: Any) -> bool:
    """Whether two leaves differ in type, dtype or shape."""
    return saved is not UNKNOWN and describe(live) != describe(saved)


def _module_targets(
    module: torch.nn.Module, saved: Mapping[str, Any]
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Saved leaves, and the live tensors that torch copies them into."""
    own = module_state.own_ways(module)
    modules = list(module.named_modules(prefix="", remove_duplicate=False))
    theirs = {
        id(tensor)
        for path, one in modules
        if own and f"{path}.".startswith(own)
        for tensor in module_state.tensors(one).values()
    }
    plain = of_torch.loader_of(torch.nn.Module)
    for path, one in modules:
        if of_torch.loader_of(type(one)) is plain:
            for name, live in module_state.tensors(one).items():
                key = f"{path}.{name}" if path else name
                if key in saved and id(live) not in theirs:
                    yield saved[key], live.detach()


def refuse(differences: Iterable[str]) -> None:
    """Raise if there are any differences.

    Raises:
        StateMismatch: Names the first of them.
    """
    found = list(differences)
    if found:
        more = len(found) - _SHOWN
        lines = found[:_SHOWN] + ([f"… and {more} more"] if more > 0 else [])
        raise StateMismatch(
            "The checkpoint does not fit the objects given to forge.Run:"
            + "".join(f"\n  - {line}" for line in lines)
            + "\nBuild them as they were at that save, or start in a new directory."
        )
