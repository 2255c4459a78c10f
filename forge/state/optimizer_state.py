"""An optimizer's state: its differences from a saved one, and an exact load.

`Optimizer.load_state_dict` casts floating-point state to the dtype of its parameter (also in lists
and dicts), splits a tensor that several parameters share, and breaks strings, arrays and
namedtuples. This is corrected right afterwards, before the user's own hooks run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from forge.checkpoint.format import shards
from forge.checkpoint.format.shards import Like
from forge.state.module_state import loads_as, mismatch, tensors_in


class TensorCopies:
    """Tensors for live objects; a tensor saved once, under several names, is one tensor again.

    Args:
        owned: The `id` of saved tensors that can become part of the live objects.
        known: By the `id` of saved tensors: live tensors that already have their values.
    """

    def __init__(self, owned: Collection[int], known: Mapping[int, torch.Tensor]) -> None:
        self._owned = owned
        self._made = {(id_, live.device): live for id_, live in known.items()}

    def of(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`value` on `device`, with its own dtype."""
        key = (id(value), device)
        if key not in self._made:
            self._made[key] = value.to(device, copy=id(value) not in self._owned)
        return self._made[key]


def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any], copies: TensorCopies) -> None:
    """Load exactly what `optimizer.load_state_dict(saved)` should load."""
    given: list[dict[str, Any]] = []

    def begin(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        given.append(state)  # the state after the user's hooks
        return {**state, "state": {k: _shielded(v) for k, v in state["state"].items()}}

    def end(one: torch.optim.Optimizer) -> None:
        _restore(one, given[-1], copies)

    handles = []
    with contextlib.suppress(AttributeError):  # an object that never called Optimizer.__init__
        handles.append(optimizer.register_load_state_dict_pre_hook(begin))
        handles.append(optimizer.register_load_state_dict_post_hook(end, prepend=True))
    was = {key: vars(optimizer).get(key) for key in ("state", "param_groups")}
    try:
        optimizer.load_state_dict(saved)
    finally:
        for handle in handles:
            handle.remove()
    if not given and is_usual(saved):  # its own method, usually an old copy of torch's
        _restore(optimizer, saved, copies)
    _keep(optimizer, **was)


def _keep(optimizer: torch.optim.Optimizer, state: Any, param_groups: Any) -> None:
    """Keep the same dict objects as before: another optimizer or a name can refer to them."""
    found = vars(optimizer)
    if isinstance(state, dict) and isinstance(found.get("state"), dict):
        _fill(state, found["state"])
        found["state"] = state
    if isinstance(param_groups, list) and isinstance(found.get("param_groups"), list):
        for group, loaded in zip(param_groups, found["param_groups"], strict=True):
            _fill(group, loaded)
        for one in found.values():  # inside this optimizer: its groups are or were these dicts
            if isinstance(one, torch.optim.Optimizer) and one.param_groups is found["param_groups"]:
                one.param_groups = param_groups
        found["param_groups"] = param_groups


def _fill(one: dict[Any, Any], content: dict[Any, Any]) -> None:
    if one is not content:
        content = dict(content)
        one.clear()
        one.update(content)


def is_usual(state: Any) -> bool:
    """Whether `state` has the structure of torch's optimizers; a wrapper's can differ."""
    groups = state.get("param_groups")
    return (
        isinstance(state.get("state"), Mapping)
        and isinstance(groups, list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    )


class _Shield:
    """Wraps a value that torch would iterate over and rebuild."""

    def __init__(self, content: Any) -> None:
        self.content = content


def _shielded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shielded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_shielded, value))
    is_whole = isinstance(value, torch.Tensor) or not isinstance(value, Iterable)
    return value if is_whole else _Shield(value)


def _restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any], copies: TensorCopies) -> None:
    parameters: dict[Any, Any] = {number: p for p, number in _numbered(optimizer, saved)}
    for number, value in saved["state"].items():
        key = parameters.get(number, number)
        if key in optimizer.state:
            optimizer.state[key] = _exact(optimizer.state[key], value, copies)


def _exact(made: Any, value: Any, copies: TensorCopies) -> Any:
    """Saved values in place of those that torch converted; keys unknown to both stay."""
    if isinstance(made, _Shield):
        return copy.deepcopy(value)
    if isinstance(made, torch.Tensor) and isinstance(value, torch.Tensor):
        return copies.of(value, made.device) if made.shape == value.shape else made
    if isinstance(made, dict) and isinstance(value, dict):
        found = copy.copy(value)
        found.clear()
        for key, one in made.items():
            found[key] = _exact(one, value[key], copies) if key in value else one
        return found
    is_sequence = isinstance(made, list | tuple) and isinstance(value, list | tuple)
    if is_sequence and len(made) == len(value):
        pairs = zip(made, value, strict=True)
        return getattr(value, "_make", type(value))([_exact(a, b, copies) for a, b in pairs])
    return made


def _numbered(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, Any]]:
    """An optimizer's parameters, and their numbers in its saved state."""
    for live, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        yield from zip(live["params"], old["params"], strict=True)


def in_place_targets(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Saved leaves, and the live tensors in their places."""
    if loads_as(optimizer, torch.optim.Optimizer) and is_usual(saved):
        for parameter, number in _numbered(optimizer, saved):
            if parameter in optimizer.state and number in saved["state"]:
                yield from pairs(saved["state"][number], optimizer.state[parameter])


def shardings(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[Any, Like]]:
    """Saved leaves that must be sharded like their parameters."""
    for parameter, number in _numbered(optimizer, saved) if is_usual(saved) else ():
        if shards.is_sharded(parameter):
            for leaf in tensors_in(saved["state"].get(number)):
                if leaf.shape == parameter.shape and leaf.dim():
                    yield leaf, Like(parameter)


def pairs(saved: Any, live: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Live tensors, and the values in their places in a saved tree."""
    if isinstance(live, torch.Tensor):
        yield saved, live
    elif isinstance(live, dict) and isinstance(saved, dict):
        for key, one in live.items():
            if key in saved:
                yield from pairs(saved[key], one)
    elif isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        for old, new in zip(saved, live, strict=False):
            yield from pairs(old, new)


def differences(name: str, live: torch.optim.Optimizer, saved: dict[str, Any]) -> Iterator[str]:
    """A sentence for each group or parameter that does not fit."""
    if not is_usual(saved):
        return
    groups, saved_groups = live.param_groups, saved["param_groups"]
    if len(groups) != len(saved_groups):
        yield mismatch(f"{name}.param_groups", f"{len(saved_groups)} groups", f"{len(groups)}")
        return
    for i, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        num_live, num_saved = len(group["params"]), len(saved_group["params"])
        if num_live != num_saved:
            place = f"{name}.param_groups[{i}]"
            yield mismatch(place, f"{num_saved} parameters", f"{num_live}")
            continue
        total = sum(parameter.numel() for parameter in group["params"])
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            state = saved["state"].get(number, {})
            # Averages of a parameter have its shape; counters, some factors, and LBFGS's common
            # state do not. It is a mismatch if no tensor fits.
            averages = {
                key: value
                for key, value in (state.items() if isinstance(state, dict) else [("", state)])
                if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() > 0
            }
            if averages and not any(_fits(v, parameter, total) for v in averages.values()):
                key, value = next(iter(averages.items()))
                place = f"{name}.state[{number}]{'.' if key else ''}{key}"
                yield mismatch(place, f"{list(value.shape)}", f"{list(parameter.shape)}")


def _fits(value: torch.Tensor, parameter: torch.Tensor, total: int) -> bool:
    sizes = zip(value.shape, parameter.shape, strict=True)
    return all(found in (1, size) for found, size in sizes) or list(value.shape) == [total]
