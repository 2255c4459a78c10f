"""Objects and parameters that registered objects use and that were not given to `forge.Run`.

Both are named before the first step. A forgotten module would restart from its initial weights,
with the momentum of trained ones.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from forge.checkpoint.format import shards
from forge.checkpoint.format.tensor_encoding import is_plain
from forge.state.module_state import tensors_in

_DEPTH = 3
"""Depth of attributes that are searched."""

_given: weakref.WeakSet[AveragedModel] = weakref.WeakSet()
"""Objects given to a Run of this process: those of an earlier fold can still exist."""


def problems(objects: Mapping[str, Any]) -> list[str]:
    """A sentence for each schedule, weight average, or optimizer inside another optimizer."""
    return list(_sentences(objects))


def is_held(one: Any, objects: Mapping[str, Any]) -> bool:
    """Whether `one` is among some objects, or in their attributes, as inside a wrapper."""
    return any(one is held for name in objects for _, held in _inside(name, objects[name], _DEPTH))


def _sentences(objects: Mapping[str, Any]) -> Iterator[str]:
    given = {id(one) for one in objects.values()}
    _given.update(one for one in objects.values() if isinstance(one, AveragedModel))
    optimizers = {name: one for name, one in objects.items() if isinstance(one, Optimizer)}
    held = {id(one) for name, one in objects.items() for _, one in _inside(name, one, _DEPTH)}
    has_modules = any(isinstance(one, Module) for one in objects.values())
    names = {id(one): name for name, one in optimizers.items()}
    for one in _in_script():
        # The type, since `isinstance` runs the code of objects that stand for others.
        kind = type(one)
        if id(one) in held:
            continue
        if issubclass(kind, AveragedModel) and has_modules and one not in _given:
            yield (
                f"the averages of the {kind.__name__} are not saved. Give it to forge.Run, as"
                " in forge.Run(…, ema=ema)"
            )
        if issubclass(kind, LRScheduler) and id(one.optimizer) in names:
            yield (
                f"the {kind.__name__} sets the learning rate of"
                f" `{names[id(one.optimizer)]}`, but is not saved. Give it to forge.Run, as in"
                " forge.Run(…, schedule=schedule)"
            )
    has_accelerator = any(type(one).__name__ == "Accelerator" for one in objects.values())
    for name, outer in optimizers.items():
        accumulated = getattr(getattr(outer, "gradient_state", None), "num_steps", 1)
        if accumulated > 1 and not has_accelerator:
            yield (
                f"`{name}` steps once in {accumulated} batches, which its Accelerator counts, but"
                " the count is not saved. Give the Accelerator to forge.Run too, as in"
                " forge.Run(…, accelerator=accelerator)"
            )
        if "param_groups" in vars(outer):  # else it is a wrapper that only forwards
            for path, inner in _inside(name, outer, 1):
                if isinstance(inner, Optimizer) and id(inner) not in given:
                    yield (
                        f"`{path}` is an optimizer inside the optimizer `{name}`, whose state_dict"
                        f" does not contain the state of `{path}`. Give both to forge.Run, as in"
                        f" forge.Run(…, inner={path})"
                    )


def _in_script() -> Iterator[Any]:
    """The objects in the variables of the calling functions, of their modules and their `self`."""
    frame, seen = inspect.currentframe(), set[int]()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] != "forge":
            snapshot = frame.f_locals
            local = dict(snapshot)
            if type(snapshot) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                snapshot.clear()  # before Python 3.13 the frame would keep the objects alive
            own = getattr(local.get("self"), "__dict__", {})
            for one in (*frame.f_globals.values(), *local.values(), *own.values()):
                if id(one) not in seen:
                    seen.add(id(one))
                    yield one
        frame = frame.f_back


def _inside(path: str, one: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """An object and the objects in its attributes, each with its path."""
    yield path, one
    if depth:
        for key, value in getattr(one, "__dict__", {}).items():
            many = value if isinstance(value, list | tuple) else [value]
            for inner in many:
                if hasattr(inner, "__dict__") and not isinstance(inner, type):
                    yield from _inside(f"{path}.{key}", inner, depth - 1)


def with_paths(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """An optimizer's parameters, and their positions in it."""
    for group, settings in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(settings["params"]):
            yield f"param_groups[{group}][{i}]", parameter


def optimizers(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers among some objects, by name."""
    for name, one in objects.items():
        if isinstance(one, torch.optim.Optimizer):
            yield name, one


def _is_plain(value: Any) -> bool:
    return is_plain(shards.local(value))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = shards.local(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def strays(objects: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """Parameters that an optimizer trains and no other object saves, by their position in it.

    Args:
        states: The results of the objects' `state_dict`.
    """
    named = dict(optimizers(objects))
    saved = {
        _memory(leaf)
        for name, state in states.items()
        if name not in named
        for leaf in filter(_is_plain, tensors_in(state))
    }
    of_modules = {
        id(parameter)
        for name, one in objects.items()
        if isinstance(one, Module)
        for key, parameter in one.named_parameters(remove_duplicate=False)
        if key in states[name]
    }
    return [
        f"{name}.{path}"
        for name, optimizer in named.items()
        for path, parameter in with_paths(optimizer)
        if parameter.requires_grad or parameter in optimizer.state
        if id(parameter) not in of_modules
        if not (_is_plain(parameter) and _memory(parameter) in saved)
    ]
