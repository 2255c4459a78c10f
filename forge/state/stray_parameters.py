"""Parameters that an optimizer trains and no registered module saves.

They are saved beside the optimizers' states, by their place in them: a bare parameter that is
learned needs no module, and one whose module was forgotten would else start from scratch at a
resume, with the momentum of a trained one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format import shards
from forge.checkpoint.format.tensor_encoding import PLAIN_TYPES
from forge.state import module_state, optimizer_state

_SHOWN = 4
"""Parameters that one message names."""

Values = dict[str, dict[str, Any]]
"""By the name of an optimizer: place in it -> tensor."""


def placed(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """An optimizer's parameters, and where in it they are."""
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
    """Their values.

    Also those of a module that leaves parameters out of its `state_dict`, but not what it leaves
    out because nobody trains it.

    Args:
        states: What the objects' `state_dict` returned.
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
        for place, parameter in placed(optimizer):
            is_trained = parameter.requires_grad or parameter in optimizer.state
            if id(parameter) in in_modules and not (is_trained and _is_plain(parameter)):
                continue
            if not (_is_plain(parameter) and _memory(parameter) in saved):
                found.setdefault(name, {})[place] = parameter.detach()
    return found


def _is_plain(value: Any) -> bool:
    value = shards.local(value)
    return type(value) in PLAIN_TYPES and value.layout is torch.strided and not value.is_nested


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = shards.local(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def nowhere(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each optimizer with parameters that no other object has in its state."""
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
            place
            for place, parameter in placed(optimizer)
            if id(parameter) not in in_modules
            and not (_is_plain(parameter) and _memory(parameter) in saved)
        ]
        if found:
            yield (
                f"{name} trains parameters that nothing else given to forge.Run holds"
                f" ({messages.few(found, _SHOWN)})"
            )


def differences(
    objects: Mapping[str, Any], saved: Values, *, is_whole: bool = True
) -> Iterator[str]:
    """A sentence for each that does not fit.

    Args:
        is_whole: Whether each that no registered module holds has to be among them.
    """
    in_modules = _in_modules(objects)
    for name, optimizer in _optimizers(objects):
        values = saved.get(name, {})
        live = {
            place: parameter.detach()
            for place, parameter in placed(optimizer)
            if place in values or (is_whole and id(parameter) not in in_modules)
        }
        yield from module_state.differences(name, live, values)


def in_place_targets(
    objects: Mapping[str, Any], saved: Values
) -> Iterator[tuple[Any, torch.Tensor]]:
    """What was saved, and the parameters it goes to."""
    for name, optimizer in _optimizers(objects):
        values = saved.get(name, {})
        for place, parameter in placed(optimizer):
            if place in values:
                yield values[place], parameter.detach()


def load(objects: Mapping[str, Any], saved: Values) -> None:
    """Put the values back."""
    for value, parameter in in_place_targets(objects, saved):
        parameter.copy_(value)
