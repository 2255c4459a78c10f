"""Objects and parameters that registered objects use and that were not given to `forge.Run`.

Objects are named before the first step. Parameters that an optimizer trains and no registered
module saves are saved next to the states of the optimizers, by their position there. A bare
learned parameter needs no module, and a forgotten module would otherwise restart from its initial
weights, with the momentum of trained ones.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from forge import messages
from forge.checkpoint.format import shards
from forge.checkpoint.format.tensor_encoding import is_plain
from forge.state.module_state import tensors_in

_DEPTH = 3
"""Depth of attributes that are searched."""

_given: weakref.WeakSet[AveragedModel] = weakref.WeakSet()
"""Objects given to a Run of this process: those of an earlier fold can still exist."""


def problems(objects: Mapping[str, Any]) -> list[str]:
    """A sentence for each schedule, weight average, or optimizer inside another optimizer."""
    found = list(_sentences(objects))
    if found:
        gc.collect()  # objects without references must not be found
        found = list(_sentences(objects))
    return found


def is_held(one: Any, objects: Mapping[str, Any]) -> bool:
    """Whether `one` is among some objects, or in their attributes, as inside a wrapper."""
    return any(one is held for name in objects for _, held in _inside(name, objects[name], _DEPTH))


def _sentences(objects: Mapping[str, Any]) -> Iterator[str]:
    given = {id(one) for one in objects.values()}
    _given.update(one for one in objects.values() if isinstance(one, AveragedModel))
    optimizers = {name: one for name, one in objects.items() if isinstance(one, Optimizer)}
    held = {id(one) for name, one in objects.items() for _, one in _inside(name, one, _DEPTH)}
    # The referrers of a class include its objects: three times faster than reading all objects.
    has_modules = any(isinstance(one, Module) for one in objects.values())
    averages = [AveragedModel, *AveragedModel.__subclasses__()] if has_modules else []
    holders = gc.get_referrers(*averages, *optimizers.values())
    for one in holders:
        if isinstance(one, AveragedModel) and id(one) not in held and one not in _given:
            yield (
                f"the averages of the {type(one).__name__} are not saved. Give it to forge.Run, as"
                " in forge.Run(…, ema=ema)"
            )
    names = {id(one): name for name, one in optimizers.items()}
    dicts = [one for one in holders if type(one) is dict and "last_epoch" in one]
    owners = gc.get_referrers(*dicts) if dicts else []  # the schedules of these dicts
    for one in [*holders, *owners]:
        if isinstance(one, LRScheduler) and id(one) not in held and id(one.optimizer) in names:
            yield (
                f"the {type(one).__name__} sets the learning rate of"
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


def _inside(path: str, one: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """An object and the objects in its attributes, each with its path."""
    yield path, one
    if depth:
        for key, value in getattr(one, "__dict__", {}).items():
            many = value if isinstance(value, list | tuple) else [value]
            for inner in many:
                if hasattr(inner, "__dict__") and not isinstance(inner, type):
                    yield from _inside(f"{path}.{key}", inner, depth - 1)


_SHOWN = 4
"""Number of parameters that one message lists."""

Values = dict[str, dict[str, Any]]
"""By the name of an optimizer: position in it -> tensor."""


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


def in_modules(objects: Mapping[str, Any]) -> set[int]:
    """The `id` of each parameter of the modules among some objects."""
    modules = (one for one in objects.values() if isinstance(one, torch.nn.Module))
    return {id(parameter) for one in modules for parameter in one.parameters()}


def capture(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Values:
    """Values of the stray parameters.

    Includes trained parameters that a module leaves out of its `state_dict`, but not untrained
    ones.

    Args:
        states: The results of the objects' `state_dict`.
    """
    of_modules = in_modules(objects)
    saved = {
        _memory(leaf)
        for name, one in objects.items()
        if isinstance(one, torch.nn.Module)
        for leaf in states[name].values()
        if _is_plain(leaf)
    }
    found: Values = {}
    for name, optimizer in optimizers(objects):
        for path, parameter in with_paths(optimizer):
            is_trained = parameter.requires_grad or parameter in optimizer.state
            if id(parameter) in of_modules and not (is_trained and _is_plain(parameter)):
                continue
            if not (_is_plain(parameter) and _memory(parameter) in saved):
                found.setdefault(name, {})[path] = parameter.detach()
    return found


def _is_plain(value: Any) -> bool:
    return is_plain(shards.local(value))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = shards.local(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def nowhere(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each optimizer with parameters that are in no other object's state."""
    of_modules = in_modules(objects)
    named = dict(optimizers(objects))
    saved = {
        _memory(leaf)
        for name, state in states.items()
        if name not in named
        for leaf in filter(_is_plain, tensors_in(state))
    }
    for name, optimizer in named.items():
        found = [
            path
            for path, parameter in with_paths(optimizer)
            if id(parameter) not in of_modules
            and not (_is_plain(parameter) and _memory(parameter) in saved)
        ]
        if found:
            yield (
                f"{name} trains parameters that are in no other object given to forge.Run"
                f" ({messages.truncate_list(found, _SHOWN)})"
            )
