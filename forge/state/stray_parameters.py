"""Parameters that an optimizer trains and no registered module saves.

They are saved next to the optimizers' states, by their position in the optimizer. A bare learned
parameter needs no module, and a forgotten module would otherwise restart from its initial weights,
with the momentum of trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format import shards
from forge.checkpoint.format.tensor_encoding import is_plain
from forge.state import module_state, optimizer_state

_SHOWN = 4
"""Number of parameters that one message lists."""

Values = dict[str, dict[str, Any]]
"""By the name of an optimizer: position in it -> tensor."""


def with_paths(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """An optimizer's parameters, and their positions in it."""
    for group, settings in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(settings["params"]):
            yield f"param_groups[{group}][{i}]", parameter


def _optimizers(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for name, one in objects.items():
        if isinstance(one, torch.optim.Optimizer):
            yield name, one


def _in_modules(objects: Mapping[str, Any]) -> set[int]:
    modules = (one for one in objects.values() if isinstance(one, torch.nn.Module))
    return {id(parameter) for one in modules for parameter in one.parameters()}


def capture(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Values:
    """Values of the stray parameters.

    Includes trained parameters that a module leaves out of its `state_dict`, but not untrained
    ones.

    Args:
        states: The results of the objects' `state_dict`.
    """
    in_modules = _in_modules(objects)
    saved = {
        _memory(leaf)
        for name, one in objects.items()
        if isinstance(one, torch.nn.Module)
        for leaf in states[name].values()
        if _is_plain(leaf)
    }
    found: Values = {}
    for name, optimizer in _optimizers(objects):
        for path, parameter in with_paths(optimizer):
            is_trained = parameter.requires_grad or parameter in optimizer.state
            if id(parameter) in in_modules and not (is_trained and _is_plain(parameter)):
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
    in_modules = _in_modules(objects)
    optimizers = dict(_optimizers(objects))
    saved = {
        _memory(leaf)
        for name, state in states.items()
        if name not in optimizers
        for leaf in filter(_is_plain, optimizer_state.tensors(state))
    }
    for name, optimizer in optimizers.items():
        found = [
            path
            for path, parameter in with_paths(optimizer)
            if id(parameter) not in in_modules
            and not (_is_plain(parameter) and _memory(parameter) in saved)
        ]
        if found:
            yield (
                f"{name} trains parameters that are in no other object given to forge.Run"
                f" ({messages.truncate_list(found, _SHOWN)})"
            )


def differences(
    objects: Mapping[str, Any], saved: Values, *, is_whole: bool = True
) -> Iterator[str]:
    """A sentence for each stray parameter that does not fit.

    Args:
        is_whole: Whether all parameters without a registered module must be among them.
    """
    in_modules = _in_modules(objects)
    for name, optimizer in _optimizers(objects):
        values = saved.get(name, {})
        live = {
            path: parameter.detach()
            for path, parameter in with_paths(optimizer)
            if path in values or (is_whole and id(parameter) not in in_modules)
        }
        yield from module_state.differences(name, live, values)


def in_place_targets(
    objects: Mapping[str, Any], saved: Values
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Saved values, and the parameters that they are loaded into."""
    for name, optimizer in _optimizers(objects):
        values = saved.get(name, {})
        for path, parameter in with_paths(optimizer):
            if path in values:
                yield values[path], parameter.detach()


def load(objects: Mapping[str, Any], saved: Values) -> None:
    """Restore the values."""
    for value, parameter in in_place_targets(objects, saved):
        parameter.copy_(value)
