"""The objects of a run: their state taken, compared leaf by leaf, and put back."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from forge import messages
from forge.checkpoint import Store
from forge.checkpoint.format import shards, tensor_encoding
from forge.checkpoint.format.shards import Like
from forge.errors import ConfigError, StateMismatch
from forge.state import (
    adapters,
    buffers,
    ddp_buckets,
    module_state,
    optimizer_state,
    stray_parameters,
    structure,
)
from forge.state.adapters import Stateful
from forge.state.optimizer_state import Copies
from forge.state.structure import Structure
from forge.state.transient_buffers import TransientBuffers

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
)  # fmt: skip

_SHOWN = 8
"""Differences that one error names."""


class StateRegistry:
    """The registered objects by name.

    Raises:
        TypeError: Naming an object that has no state to save.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.given = objects = dict(each for one in objects.items() for each in adapters.each(*one))
        """As the user knows them; those of `objects` are what is inside of wrappers."""
        self.objects: dict[str, Stateful] = {}
        for name, one in objects.items():
            one = adapters.stateful(one)
            if not isinstance(one, Stateful):
                raise TypeError(
                    f"forge.Run({name.partition('.')[0]}=…): a {type(one).__name__} has no"
                    " state_dict and load_state_dict, so it cannot be saved. Pass the object that"
                    " has (the module, the optimizer, …), or give it these two methods; values"
                    " belong into run.state."
                )
            self.objects[name] = adapters.unwrapped(one)
        self._transient_buffers = TransientBuffers(self.objects)
        self._built: Structure | None = None
        """How the script has built them, once that is known."""
        self._groups: dict[str, list[list[torch.Tensor]]] = {}
        self.optimizers = [o for o in self.objects.values() if isinstance(o, torch.optim.Optimizer)]
        """The registered optimizers."""

    def holds(self, one: object) -> bool:
        """Whether this very object is registered."""
        return any(known is adapters.unwrapped(one) for known in self.objects.values())

    def name_of(self, one: object) -> str:
        """The name that a registered object was given."""
        return next(n for n, known in self.objects.items() if known is adapters.unwrapped(one))

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers under every name that it has."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                yield from one.named_parameters(prefix=name, remove_duplicate=False)
        for name, one in self.objects.items():
            if isinstance(one, torch.optim.Optimizer):
                for place, parameter in stray_parameters.placed(one):
                    yield f"{name}.{place}", parameter

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every module, the registered ones and those in them."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                yield from one.named_modules(prefix=name)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers, each once, with a name for people."""
        seen: set[int] = set()
        for name, parameter in self._named():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def local_parameters(self) -> Iterator[torch.Tensor]:
        """What this rank holds of them, but for those that are not made yet."""
        made = (one for _, one in self.parameters() if not tensor_encoding.is_lazy(one))
        return map(shards.local, made)

    def check_groups(self) -> None:
        """Refuse what has changed in the groups of optimizers, before it is saved.

        Raises:
            ConfigError: Naming the optimizer.
        """
        if self._built is not None:
            optimizers = {self.name_of(one): one for one in self.optimizers}
            structure.check_groups(self._groups, self._built.order, optimizers)

    def capture(self, states: dict[str, Any] | None = None) -> dict[str, Any]:
        """Everything, gradients that are being accumulated included.

        Raises:
            ConfigError: Naming what no start could load, since the loop has changed it.
        """
        self._transient_buffers.check()
        for path, one in self._modules():
            module_state.check_reduced(path, one)
        if states is None:
            states = {name: one.state_dict() for name, one in self.objects.items()}
        now = structure.of(self.objects, states)
        built = self._built or now
        structure.check(built, now)
        return {
            "kinds": {name: _kind(one) for name, one in self.objects.items()},
            "states": states,
            "order": now.order,
            "tied": now.tied,
            "buffers": {n: buffers.changed(built.buffers[n], now.buffers[n]) for n in now.buffers},
            "unregistered": stray_parameters.capture(self.objects, states),
            "evaluating": [name for name, one in self._modules() if not one.training],
            "dropout": {name: one.p for name, one in self._modules() if isinstance(one, _DROPOUTS)},
            "frozen": [name for name, p in self.parameters() if not p.requires_grad],
            "buckets": ddp_buckets.capture(self.objects),
            "grads": {name: p.grad for name, p in self.parameters() if p.grad is not None},
        }

    def ask(self) -> dict[str, Any]:
        """Every object's state, asked for before the first step.

        Raises:
            ConfigError: Naming an object that raises.
        """
        return {name: asked(name, one) for name, one in self.objects.items()}

    def check_savable(self, states: dict[str, Any] | None = None) -> None:
        """Warn of what may be missing in a captured state; from now on objects stay as built.

        Args:
            states: What `ask` returned.
        Raises:
            CheckpointError: Naming what cannot be saved.
        """
        for path, module in self._modules():
            module_state.check_kind(path, module)
        states = self.ask() if states is None else states
        self._built = structure.built(self.objects, states)
        self._groups = {
            self.name_of(one): [list(group["params"]) for group in one.param_groups]
            for one in self.optimizers
        }
        captured = self.capture(states)
        Store.check_savable(captured)
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                module_state.check_loadable(name, captured["states"][name])
        for sentence in stray_parameters.nowhere(self.objects, captured["states"]):
            messages.warn(
                f"{sentence}. Their values are saved with it; if they belong to a module, nothing"
                " else of it (averages of a BatchNorm, other buffers) is saved: give the module to"
                " forge.Run, too."
            )

    def in_place_targets(self, saved: dict[str, Any]) -> list[tuple[Any, torch.Tensor | Like]]:
        """For leaves of a captured state, the live tensors that loading it would copy them to.

        Only where torch itself loads: another class may do anything with what it is given. What is
        to be sharded comes with a live tensor that is sharded so.

        Args:
            saved: May hold tensors without data, and `UNKNOWN`.
        Raises:
            StateMismatch: As `load`.
        """
        self.check(saved)
        found: list[tuple[Any, torch.Tensor | Like]] = list(self.shardings(saved))
        found += stray_parameters.in_place_targets(self.objects, saved["unregistered"])
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                found += module_state.in_place_targets(one, saved["states"][name])
            elif isinstance(one, torch.optim.Optimizer):
                found += optimizer_state.in_place_targets(one, saved["states"][name])
        return found

    def shardings(self, saved: dict[str, Any]) -> Iterator[tuple[Any, Like]]:
        """Leaves of a captured state that are to be sharded, as live tensors are."""
        named = dict(self._named())
        if not any(map(shards.is_sharded, named.values())):
            return
        strays = stray_parameters.in_place_targets(self.objects, saved.get("unregistered", {}))
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
        """Compare a captured state with the objects, as far as that is known beforehand.

        Raises:
            StateMismatch: Naming each leaf, what was expected and what was found.
        """
        refuse(self._differences(saved))

    def prepare(self, saved: dict[str, Any]) -> None:
        """What has to be done before any tensor of a captured state is read into a live one."""
        ddp_buckets.restore(self.objects, saved.get("buckets", {}))

    def load(self, saved: dict[str, Any], owned: Collection[int] = frozenset()) -> None:
        """Put a captured state back; compares first, so that a misfit changes nothing.

        What a module loads in a way of its own is compared afterwards.

        Args:
            owned: The `id` of tensors that may become part of the live objects; of all others
                they get copies.
        Raises:
            StateMismatch: Naming each leaf, what was expected and what was found.
        """
        self.check(saved)
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                first, wanted = self._buffers_of(name, one, saved)
                buffers.fit(one, first, wanted)
        copies = Copies(owned, self._known(saved))
        for name in self.objects:
            self.put(name, saved["states"][name], copies)
        stray_parameters.load(self.objects, saved["unregistered"])
        self._load_gradients(saved, copies)
        self._load_modes(saved)
        refuse(self._late_differences(saved))

    def put(self, name: str, state: dict[str, Any], copies: Copies) -> None:
        """Put one object's state back.

        Raises:
            StateMismatch: Where the object itself refuses it.
        """
        one = self.objects[name]
        try:
            if isinstance(one, torch.optim.Optimizer):
                optimizer_state.load(one, state, copies)
            else:
                one.load_state_dict(state)
        except Exception as error:  # it may be the user's own
            raise StateMismatch(f"{name}: {_kind(one)}.load_state_dict failed: {error}") from error

    def _known(self, saved: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Leaves of modules and the tensors they go to: an optimizer may refer to them as well."""
        return {
            id(leaf): live
            for name, one in self.objects.items()
            if isinstance(one, torch.nn.Module)
            for leaf, live in module_state.in_place_targets(one, saved["states"][name])
        }

    def _load_gradients(self, saved: dict[str, Any], copies: Copies) -> None:
        frozen, gradients = set(saved["frozen"]), dict(saved["grads"])
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in self._named():
            names.setdefault(parameter, []).append(name)
        for parameter, known_as in names.items():
            # Which of several names it was saved under depends on the order of the objects.
            parameter.requires_grad_(frozen.isdisjoint(known_as))
            found = [gradients.pop(name) for name in known_as if name in gradients]
            parameter.grad = copies.of(found[0], parameter.device) if found else None
        refuse(f"{name}: expected no such parameter, found its gradient" for name in gradients)

    def _load_modes(self, saved: dict[str, Any]) -> None:
        """How modules behave, which no `state_dict` says."""
        evaluating, dropout = set(saved.get("evaluating", ())), saved.get("dropout", {})
        for name, one in self._modules():
            one.training = name not in evaluating
            if name in dropout and isinstance(one, _DROPOUTS):
                one.p = dropout[name]

    def _differences(self, saved: dict[str, Any]) -> Iterator[str]:
        for name in sorted(self.objects.keys() | saved["states"].keys()):
            if name not in saved["states"]:
                yield f"{name}: expected its state in the checkpoint, found none"
            elif name not in self.objects:
                yield f"{name}: expected an object of this name, found none given to forge.Run"
            else:
                yield from self._object_differences(name, self.objects[name], saved)
        if "unregistered" in saved and self.objects.keys() == saved["states"].keys():
            yield from stray_parameters.differences(self.objects, saved["unregistered"])
        if "tied" in saved and self.objects.keys() == saved["states"].keys():
            yield from structure.tied_differences(self._as_built(), saved)

    def _as_built(self) -> Structure:
        return self._built or structure.built(self.objects, self.ask())

    def _buffers_of(
        self, name: str, one: torch.nn.Module, saved: dict[str, Any]
    ) -> tuple[buffers.Built, dict[str, Any]]:
        """How a module's buffers were built, and what they are to be made like for this state."""
        first = self._built.buffers[name] if self._built is not None else buffers.built(one)
        recorded = saved.get("buffers", {}).get(name, {})
        return first, buffers.targets(one, first, saved["states"][name], recorded)

    def _object_differences(self, name: str, one: Stateful, saved: dict[str, Any]) -> Iterator[str]:
        state = saved["states"][name]
        adapters.check(one, state)
        kind = _of_main(saved["kinds"].get(name, _kind(one)))
        if isinstance(one, torch.nn.Module):
            own = module_state.own_ways(one)
            _, made = self._buffers_of(name, one, saved)
            live = {key: leaf for key, leaf in one.state_dict().items() if key not in made}
            rest = {key: leaf for key, leaf in state.items() if key not in made}
            yield from module_state.differences(name, live, rest, own)
        elif kind != _kind(one):
            yield f"{name}: expected a {_kind(one)}, found the state of a {kind}"
        elif isinstance(one, torch.optim.Optimizer):
            order = saved.get("order", {}).get(name, [])  # not in what a run begins with
            is_in_order = True
            for place, was, found in structure.order_differences(
                structure.orders(self.objects)[name], order
            ):
                is_in_order = False
                yield (
                    f"{name}.{place}: expected the state of {was}, found that of {found}."
                    " Parameters have to come in the same order at every start: sort those that"
                    " come out of a set"
                )
            if is_in_order:
                yield from optimizer_state.differences(name, one, state)

    def _late_differences(self, saved: dict[str, Any]) -> Iterator[str]:
        """Those of modules that load in a way of their own: they were left to it so far."""
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module) and module_state.own_ways(one):
                yield from module_state.differences(name, one.state_dict(), saved["states"][name])


def asked(name: str, one: Any) -> Any:
    """The state of an object that is asked for the first time.

    Raises:
        ConfigError: Where it raises: at the stop that would cost all there is.
    """
    try:
        return one.state_dict()
    except Exception as error:  # the user's own
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            [
                f"{name}: {_kind(one)}.state_dict() raised {type(error).__name__}: {error}"
                f" ({place.filename}:{place.lineno}). No save would succeed. Repair it, or leave"
                " the object out and give forge the one that it wraps."
            ],
            "What is to be saved",
        ) from error


def refuse(differences: Iterable[str]) -> None:
    """Raise if there are any.

    Raises:
        StateMismatch: Naming the first of them.
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


def _kind(one: object) -> str:
    return _of_main(f"{type(one).__module__}.{type(one).__qualname__}")


def _of_main(kind: str) -> str:
    """The script is `__main__` where it is started, and `__mp_main__` in a job of a sweep."""
    return f"__main__.{kind[12:]}" if kind.startswith("__mp_main__.") else kind
