"""The objects of a run: their state taken, compared leaf by leaf, and put back."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from forge.checkpoint.codec import UNKNOWN
from forge.errors import StateMismatch

_SHOWN = 8
"""Differences that one error names."""


@runtime_checkable
class Stateful(Protocol):
    """What `forge.Run` saves: modules, optimizers, schedules, scalers, and anything like them."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from there."""
        ...


class _GeneratorState:
    """A `torch.Generator` as an object with a state_dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.generator.set_state(state_dict["state"])


class LiveState:
    """The registered objects by name.

    Raises:
        TypeError: Naming an object that has no state to save.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects: dict[str, Stateful] = {}
        for name, one in objects.items():
            if isinstance(one, torch.Generator):
                one = _GeneratorState(one)
            if not isinstance(one, Stateful):
                raise TypeError(
                    f"forge.Run({name}=…): a {type(one).__name__} has no state_dict and"
                    " load_state_dict, so it cannot be saved. Pass the object that has (the module,"
                    " the optimizer, …), or give it these two methods."
                )
            self.objects[name] = one

    def holds(self, one: object) -> bool:
        """Whether this very object is registered."""
        return any(known is one for known in self.objects.values())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers."""
        return [one for one in self.objects.values() if isinstance(one, torch.optim.Optimizer)]

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of modules and optimizers, each once, with a name for people."""
        seen: set[int] = set()
        for name, one in self.objects.items():
            if isinstance(one, torch.nn.Module):
                for key, parameter in one.named_parameters(prefix=name):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield key, parameter
        for name, one in self.objects.items():
            if isinstance(one, torch.optim.Optimizer):
                for group, settings in enumerate(one.param_groups):
                    for i, parameter in enumerate(settings["params"]):
                        if id(parameter) not in seen:
                            seen.add(id(parameter))
                            yield f"{name}.param_groups[{group}][{i}]", parameter

    def capture(self) -> dict[str, Any]:
        """Everything, gradients that are being accumulated included."""
        return {
            "kinds": {name: _kind(one) for name, one in self.objects.items()},
            "states": {name: one.state_dict() for name, one in self.objects.items()},
            "frozen": [name for name, p in self.parameters() if not p.requires_grad],
            "grads": {name: p.grad for name, p in self.parameters() if p.grad is not None},
        }

    def places(self, saved: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
        """For leaves of a captured state, the live tensors that loading it would copy them to.

        Only where torch itself loads: another class may do anything with what it is given.

        Args:
            saved: May hold tensors without data, and `UNKNOWN`.
        Raises:
            StateMismatch: As `load`.
        """
        self._compare(saved)
        return [
            pair
            for name, one in self.objects.items()
            for pair in _places(one, saved["states"][name])
        ]

    def _compare(self, saved: dict[str, Any]) -> None:
        differences = list(self._differences(saved))
        if differences:
            more = len(differences) - _SHOWN
            lines = differences[:_SHOWN] + ([f"… and {more} more"] if more > 0 else [])
            raise StateMismatch(
                "The checkpoint does not fit the objects given to forge.Run:"
                + "".join(f"\n  - {line}" for line in lines)
                + "\nBuild them as they were when this was saved (with what the loop had added to"
                " them by then), or start a new directory."
            )

    def load(
        self,
        saved: dict[str, Any],
        owned: Collection[int] = frozenset(),
        is_kept: bool = False,
    ) -> None:
        """Put a captured state back; compares first, so that a misfit changes nothing.

        Args:
            owned: The `id` of tensors that may become part of the live objects; of all others
                they get copies.
            is_kept: Whether `saved` is to be loaded once more: then the objects get copies of all
                that they might keep and change, but not of what torch itself copies.
        Raises:
            StateMismatch: Naming each leaf, what was expected and what was found.
        """
        self._compare(saved)
        if is_kept:
            copied = self._copied(saved)
            saved = {**saved, "states": copy.deepcopy(saved["states"], {id(t): t for t in copied})}
        for name, one in self.objects.items():
            try:
                one.load_state_dict(saved["states"][name])
            except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise StateMismatch(
                    f"{name}: {_kind(one)}.load_state_dict failed: {error}"
                ) from error
            if isinstance(one, torch.optim.Optimizer):
                _make_exact(one, saved["states"][name], owned)
        frozen = set(saved["frozen"])
        for name, parameter in self.parameters():
            parameter.requires_grad_(name not in frozen)
            gradient = saved["grads"].get(name)
            if gradient is not None:
                is_owned = id(gradient) in owned
                gradient = gradient.to(parameter.device, copy=not is_owned)
            parameter.grad = gradient

    def _copied(self, saved: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Tensors of a captured state of which `load` makes copies anyhow."""
        for name, one in self.objects.items():
            state = saved["states"][name]
            if isinstance(one, torch.optim.Optimizer) and _loads_as(one, torch.optim.Optimizer):
                found = [state["state"].get(number) for _, number in _numbered(one, state)]
                leaves = [v for some in found if isinstance(some, dict) for v in some.values()]
            else:
                leaves = [leaf for leaf, _ in _places(one, state)]
            yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _differences(self, saved: dict[str, Any]) -> Iterator[str]:
        for name in sorted(self.objects.keys() | saved["states"].keys()):
            if name not in saved["states"]:
                yield f"{name}: expected its state in the checkpoint, found none"
            elif name not in self.objects:
                yield f"{name}: expected an object of this name, found none given to forge.Run"
            else:
                yield from self._object_differences(name, self.objects[name], saved)

    def _object_differences(self, name: str, one: Stateful, saved: dict[str, Any]) -> Iterator[str]:
        state = saved["states"][name]
        if isinstance(one, torch.nn.Module):
            yield from _module_differences(name, one.state_dict(), state)
        elif saved["kinds"][name] != _kind(one):
            yield f"{name}: expected a {_kind(one)}, found the state of a {saved['kinds'][name]}"
        elif isinstance(one, torch.optim.Optimizer):
            yield from _optimizer_differences(name, one, state)


def _kind(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"a {type(value).__name__}"


def _places(one: Stateful, saved: Any) -> Iterator[tuple[Any, Any]]:
    """Leaves of what was saved, and what is live in their places."""
    if isinstance(one, torch.nn.Module) and _loads_as(one, torch.nn.Module):
        for prefix, module in one.named_modules(remove_duplicate=False):
            if type(module)._load_from_state_dict is torch.nn.Module._load_from_state_dict:
                for name, live in (*module._parameters.items(), *module._buffers.items()):
                    key = f"{prefix}.{name}" if prefix else name
                    if live is not None and key in saved:
                        yield saved[key], live.detach()
    elif isinstance(one, torch.optim.Optimizer) and _loads_as(one, torch.optim.Optimizer):
        for parameter, number in _numbered(one, saved):
            live_state = one.state.get(parameter, {})
            for key, value in saved["state"].get(number, {}).items():
                if isinstance(live_state.get(key), torch.Tensor):
                    yield value, live_state[key]


def _loads_as(one: Any, kind: Any) -> bool:
    return type(one).load_state_dict is kind.load_state_dict and "load_state_dict" not in vars(one)


def _numbered(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, Any]]:
    """An optimizer's parameters, and their numbers in its saved state."""
    for live, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        yield from zip(live["params"], old["params"], strict=True)


def _module_differences(name: str, live: dict[str, Any], saved: dict[str, Any]) -> Iterator[str]:
    for key in [*live, *(k for k in saved if k not in live)]:
        leaf = f"{name}.{key}"
        if key not in saved:
            yield f"{leaf}: expected {_describe(live[key])}, found nothing in the checkpoint"
        elif key not in live:
            yield f"{leaf}: expected nothing, found {_describe(saved[key])} in the checkpoint"
        elif saved[key] is not UNKNOWN and _describe(live[key]) != _describe(saved[key]):
            yield f"{leaf}: expected {_describe(live[key])}, found {_describe(saved[key])}"


def _optimizer_differences(
    name: str, live: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[str]:
    groups, saved_groups = live.param_groups, saved["param_groups"]
    if len(groups) != len(saved_groups):
        yield f"{name}.param_groups: expected {len(groups)} groups, found {len(saved_groups)}"
        return
    for i, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        expected, found = len(group["params"]), len(saved_group["params"])
        if expected != found:
            yield f"{name}.param_groups[{i}]: expected {expected} parameters, found {found}"
            continue
        total = sum(parameter.numel() for parameter in group["params"])
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            # Averages of a parameter have its shape; counters have not, nor do all factors, or
            # what LBFGS keeps for all parameters at once. It misfits where nothing fits.
            averages = {
                key: value
                for key, value in saved["state"].get(number, {}).items()
                if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() > 0
            }
            if averages and not any(_fits(v, parameter, total) for v in averages.values()):
                key, value = next(iter(averages.items()))
                yield (
                    f"{name}.state[{number}].{key}: expected {list(parameter.shape)},"
                    f" found {list(value.shape)}"
                )


def _fits(value: torch.Tensor, parameter: torch.Tensor, total: int) -> bool:
    sizes = zip(value.shape, parameter.shape, strict=True)
    return all(found in (1, size) for found, size in sizes) or list(value.shape) == [total]


def _make_exact(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], owned: Collection[int]
) -> None:
    """Undo what `Optimizer.load_state_dict` does to state: it casts to the parameter's dtype.

    It also keeps the loaded tensors themselves, which are good for that only if `owned`.
    """
    for parameter, number in _numbered(optimizer, saved):
        live_state = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            live = live_state.get(key)
            are_tensors = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
            if are_tensors and live.shape == value.shape:
                dtype = live.dtype if key == "step" else value.dtype
                live_state[key] = value.to(live.device, dtype, copy=id(value) not in owned)
