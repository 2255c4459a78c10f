"""The objects given to a run: capturing, comparing and restoring their state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from forge import messages
from forge.checkpoint.format import shards
from forge.checkpoint.format.shards import Like
from forge.checkpoint.store import Store
from forge.errors import ConfigError, StateMismatch
from forge.group.collectives import num_ranks
from forge.state import (
    adapters,
    module_state,
    optimizer_state,
    structure,
    unregistered,
)
from forge.state.adapters import Stateful
from forge.state.optimizer_state import TensorCopies
from forge.state.structure import Structure

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip

_SHOWN = 8
"""Number of differences that one error lists."""


class StateRegistry:
    """The registered objects by name.

    Raises:
        ConfigError: If an object has no state to save; names it.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.given = objects = dict(each for one in objects.items() for each in adapters.each(*one))
        """The objects as the user passed them; `objects` has the objects inside wrappers."""
        self.objects: dict[str, Stateful] = {}
        for name, one in objects.items():
            one = adapters.stateful(one)
            if not isinstance(one, Stateful):
                raise ConfigError(
                    [
                        f"forge.Run({name.partition('.')[0]}=…): a {type(one).__name__} has no"
                        " state_dict and load_state_dict, so it cannot be saved. Pass the object"
                        " that has them (the module, the optimizer, …), or add these two methods;"
                        " plain values belong in run.state."
                    ],
                    "The call of forge.Run",
                )
            self.objects[name] = adapters.unwrapped(one)
        self._built: Structure | None = None
        """The structure of the objects as the script built them; None before `check_savable`."""
        self._groups: structure.Groups = {}
        self.optimizers = [o for o in self.objects.values() if isinstance(o, torch.optim.Optimizer)]
        """The registered optimizers."""

    def has(self, one: object) -> bool:
        """Whether this very object is registered."""
        return any(known is adapters.unwrapped(one) for known in self.objects.values())

    def name_of(self, one: object) -> str:
        """The name under which an object is registered."""
        return next(n for n, known in self.objects.items() if known is adapters.unwrapped(one))

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers, under each of its names."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                yield from one.named_parameters(prefix=name, remove_duplicate=False)
        for name, one in self.objects.items():
            if isinstance(one, torch.optim.Optimizer):
                for place, parameter in unregistered.with_paths(one):
                    yield f"{name}.{place}", parameter

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All modules: the registered ones and their submodules."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                yield from one.named_modules(prefix=name)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers once, with a name for messages."""
        seen: set[int] = set()
        for name, parameter in self._named():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def local_parameters(self) -> Iterator[torch.Tensor]:
        """This rank's part of the parameters."""
        return (shards.local(one) for _, one in self.parameters())

    def check_groups(self) -> None:
        """Refuse changes to the groups of optimizers, before they are saved.

        Raises:
            ConfigError: Names the optimizer.
        """
        if self._built is not None:
            structure.check_groups(self._groups, self._built.order)

    def capture(self, states: dict[str, Any] | None = None) -> dict[str, Any]:
        """The state of all objects, including gradients that are being accumulated.

        Raises:
            ConfigError: If the loop has changed objects so that no later start could load them.
        """
        for path, one in self._modules():
            module_state.check_reduced(path, one)
        if states is None:
            states = {name: one.state_dict() for name, one in self.objects.items()}
        now = structure.of(self.objects, states)
        built = self._built or now
        structure.check(built, now)
        return {
            "kinds": {name: adapters.class_name(one) for name, one in self.objects.items()},
            "states": states,
            "order": now.order,
            "tied": now.tied,
            "unregistered": unregistered.capture(self.objects, states),
            "evaluating": [name for name, one in self._modules() if not one.training],
            "dropout": {name: one.p for name, one in self._modules() if isinstance(one, _DROPOUTS)},
            "frozen": [name for name, p in self.parameters() if not p.requires_grad],
            "buckets": self._buckets(),
            "grads": {name: p.grad for name, p in self.parameters() if p.grad is not None},
        }

    def _buckets(self) -> dict[str, list[int]]:
        """The order in which DDP sums gradients over several ranks."""
        if num_ranks() == 1:
            return {}
        from forge.state import ddp_buckets  # most Runs are a single process

        return ddp_buckets.capture(self.objects)

    def read_states(self) -> dict[str, Any]:
        """Read every object's state before the first step.

        Raises:
            ConfigError: If an object raises; names it.
        """
        return {name: adapters.read_state(name, one) for name, one in self.objects.items()}

    def check_savable(self, states: dict[str, Any] | None = None) -> None:
        """Warn of values missing in a captured state; from now on objects must stay as built.

        Args:
            states: The result of `read_states`.
        Raises:
            CheckpointError: If something cannot be saved; names it.
        """
        for path, module in self._modules():
            module_state.check_kind(path, module)
        states = self.read_states() if states is None else states
        self._built = structure.built(self.objects, states)
        self._groups = {
            self.name_of(one): (one, [list(group["params"]) for group in one.param_groups])
            for one in self.optimizers
        }
        captured = self.capture(states)
        Store.check_savable(captured)
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                module_state.check_loadable(name, captured["states"][name])
        for sentence in unregistered.nowhere(self.objects, captured["states"]):
            messages.warn(
                f"{sentence}. forge saves their values. If they belong to a module, nothing else of"
                " the module (BatchNorm averages, other buffers) is saved: give the module to"
                " forge.Run too."
            )

    def in_place_targets(self, saved: dict[str, Any]) -> list[tuple[Any, torch.Tensor | Like]]:
        """The live tensors that loading would copy the leaves of a captured state to.

        Only for objects that torch itself loads: another class can do anything. A leaf that must
        be sharded comes with a live tensor that is sharded in the same way.

        Args:
            saved: Can contain tensors without data, and `UNKNOWN`.
        Raises:
            StateMismatch: Like `load`.
        """
        self.check(saved)
        found: list[tuple[Any, torch.Tensor | Like]] = list(self.shardings(saved))
        found += unregistered.in_place_targets(self.objects, saved["unregistered"])
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                found += module_state.in_place_targets(one, saved["states"][name])
            elif isinstance(one, torch.optim.Optimizer):
                found += optimizer_state.in_place_targets(one, saved["states"][name])
        return found

    def shardings(self, saved: dict[str, Any]) -> Iterator[tuple[Any, Like]]:
        """Leaves of a captured state that must be sharded like live tensors."""
        named = dict(self._named())
        if not any(map(shards.is_sharded, named.values())):
            return
        strays = unregistered.in_place_targets(self.objects, saved.get("unregistered", {}))
        yield from ((leaf, Like(live)) for leaf, live in strays if shards.is_sharded(live))
        for name, leaf in saved.get("grads", {}).items():
            if shards.is_sharded(named.get(name)):
                yield leaf, Like(named[name])
        for name, one in self.objects.items():
            if isinstance(one, torch.optim.Optimizer):
                yield from optimizer_state.shardings(one, saved["states"][name])
            else:
                live = one.state_dict()
                for leaf, tensor in optimizer_state.pairs(saved["states"][name], live):
                    is_alike = getattr(leaf, "shape", None) == tensor.shape
                    if shards.is_sharded(tensor) and is_alike:
                        yield leaf, Like(tensor)

    def check(self, saved: dict[str, Any]) -> None:
        """Compare a captured state with the objects, as far as possible before loading.

        Raises:
            StateMismatch: Names each leaf that differs.
        """
        refuse(self._differences(saved))

    def prepare(self, saved: dict[str, Any]) -> None:
        """Prepare the objects before tensors of a captured state are read into live ones."""
        if num_ranks() > 1:
            from forge.state import ddp_buckets

            ddp_buckets.restore(self.objects, saved.get("buckets", {}))

    def load(self, saved: dict[str, Any], owned: Collection[int] = frozenset()) -> None:
        """Restore a captured state; compares first, so that a mismatch changes nothing.

        Modules with their own loading method are compared afterwards.

        Args:
            owned: The `id` of tensors that can become part of the live objects; others are
                copied.
        Raises:
            StateMismatch: Names each leaf that differs.
        """
        self.check(saved)
        copies = TensorCopies(owned, self._known(saved))
        for name in self.objects:
            self.put(name, saved["states"][name], copies)
        unregistered.load(self.objects, saved["unregistered"])
        self._load_gradients(saved, copies)
        self._load_modes(saved)
        refuse(self._late_differences(saved))

    def put(self, name: str, state: dict[str, Any], copies: TensorCopies) -> None:
        """Restore one object's state.

        Raises:
            StateMismatch: If the object itself refuses the state.
        """
        one = self.objects[name]
        try:
            if isinstance(one, torch.optim.Optimizer):
                optimizer_state.load(one, state, copies)
            else:
                one.load_state_dict(state)
        except Exception as error:  # the object can be the user's own
            raise StateMismatch(
                f"{name}: {adapters.class_name(one)}.load_state_dict failed: {error}"
            ) from error

    def _known(self, saved: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Leaves of modules and their live tensors, which an optimizer can refer to as well."""
        return {
            id(leaf): live
            for name, one in self.objects.items()
            if isinstance(one, torch.nn.Module)
            for leaf, live in module_state.in_place_targets(one, saved["states"][name])
        }

    def _load_gradients(self, saved: dict[str, Any], copies: TensorCopies) -> None:
        frozen, gradients = set(saved["frozen"]), dict(saved["grads"])
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in self._named():
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

    def _load_modes(self, saved: dict[str, Any]) -> None:
        """Restore attributes that no `state_dict` contains, such as `training`."""
        evaluating, dropout = set(saved.get("evaluating", ())), saved.get("dropout", {})
        for name, one in self._modules():
            one.training = name not in evaluating
            if name in dropout and isinstance(one, _DROPOUTS):
                one.p = dropout[name]

    def _differences(self, saved: dict[str, Any]) -> Iterator[str]:
        for name in sorted(self.objects.keys() | saved["states"].keys()):
            if name not in saved["states"]:
                yield f"{name}: was given to forge.Run, but is not in the checkpoint"
            elif name not in self.objects:
                yield f"{name}: is in the checkpoint, but was not given to forge.Run"
            else:
                yield from self._object_differences(name, self.objects[name], saved)
        if "unregistered" in saved and self.objects.keys() == saved["states"].keys():
            yield from unregistered.differences(self.objects, saved["unregistered"])
        if "tied" in saved and self.objects.keys() == saved["states"].keys():
            yield from structure.tied_differences(self._as_built(), saved)

    def _as_built(self) -> Structure:
        return self._built or structure.built(self.objects, self.read_states())

    def _object_differences(self, name: str, one: Stateful, saved: dict[str, Any]) -> Iterator[str]:
        state = saved["states"][name]
        adapters.check(one, state)
        kind = adapters.of_main(saved["kinds"].get(name, adapters.class_name(one)))
        if isinstance(one, torch.nn.Module):
            own = module_state.own_ways(one)
            yield from module_state.differences(name, one.state_dict(), state, own)
        elif kind != adapters.class_name(one):
            yield (
                f"{name}: the checkpoint has the state of a {kind}, but forge.Run was given a"
                f" {adapters.class_name(one)}"
            )
        elif isinstance(one, torch.optim.Optimizer):
            order = saved.get("order", {}).get(name, [])  # absent for `init_from`
            is_in_order = True
            for place, was, found in structure.order_differences(
                structure.orders(self.objects)[name], order
            ):
                is_in_order = False
                yield (
                    f"{module_state.mismatch(f'{name}.{place}', found, was)}."
                    " Parameters must have the same order at every start: if they are collected in"
                    " a Python set, sort them"
                )
            if is_in_order:
                yield from optimizer_state.differences(name, one, state)

    def _late_differences(self, saved: dict[str, Any]) -> Iterator[str]:
        """Differences of modules that load in their own way, which are compared after loading."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module) and module_state.own_ways(one):
                yield from module_state.differences(name, one.state_dict(), saved["states"][name])


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
