"""The objects of a run: their state taken, compared leaf by leaf, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

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

    def load(self, saved: dict[str, Any]) -> None:
        """Put a captured state back; compares first, so that a misfit changes nothing.

        Raises:
            StateMismatch: Naming each leaf, what was expected and what was found.
        """
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
        for name, one in self.objects.items():
            try:
                one.load_state_dict(saved["states"][name])
            except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
                raise StateMismatch(
                    f"{name}: {_kind(one)}.load_state_dict failed: {error}"
                ) from error
            if isinstance(one, torch.optim.Optimizer):
                _make_exact(one, saved["states"][name])
        frozen = set(saved["frozen"])
        for name, parameter in self.parameters():
            parameter.requires_grad_(name not in frozen)
            gradient = saved["grads"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

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


def _module_differences(name: str, live: dict[str, Any], saved: dict[str, Any]) -> Iterator[str]:
    for key in [*live, *(k for k in saved if k not in live)]:
        leaf = f"{name}.{key}"
        if key not in saved:
            yield f"{leaf}: expected {_describe(live[key])}, found nothing in the checkpoint"
        elif key not in live:
            yield f"{leaf}: expected nothing, found {_describe(saved[key])} in the checkpoint"
        elif _describe(live[key]) != _describe(saved[key]):
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


def _make_exact(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo what `Optimizer.load_state_dict` does to state: it casts to the parameter's dtype.

    It also keeps the loaded tensors themselves, which are views of the whole file's memory.
    """
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    pairs = [p for live, old in groups for p in zip(live["params"], old["params"], strict=True)]
    for parameter, number in pairs:
        live_state = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            live = live_state.get(key)
            are_tensors = isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)
            if are_tensors and live.shape == value.shape:
                dtype = live.dtype if key == "step" else value.dtype
                live_state[key] = value.to(live.device, dtype, copy=True)
