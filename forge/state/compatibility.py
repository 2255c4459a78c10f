"""Checks whether a saved state fits an object, if the state does not name its class.

Torch accepts many wrong states silently: a schedule's `load_state_dict` sets any attribute it is
given, and an optimizer's loads all settings of a group, including those of another algorithm.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from forge.compat import of_torch
from forge.state.module_state import describe, mismatch
from forge.state.optimizer_state import is_usual

_IMPLEMENTATION = {
    *("capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize"),
}
"""Settings added to torch's optimizers over time: they differ by version, not by algorithm."""

_OF_SOME_VERSIONS = {"default_min_lr", "use_beta1", "verbose"}
"""Attributes that a schedule has in some versions of torch only."""


def differences(name: str, one: Any, state: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each leaf that belongs to another class than that of `one`."""
    if isinstance(one, torch.optim.Optimizer):
        yield from _of_optimizer(name, one, state)
    elif isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        yield from _of_schedule(name, one, state)


def _of_optimizer(name: str, one: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[str]:
    if not is_usual(state):
        if is_usual(one.state_dict()):
            keys = ", ".join(map(str, state))
            yield f"{name}: expected the state of an optimizer in the checkpoint, found {keys}"
        return
    for i, (live, saved) in enumerate(zip(one.param_groups, state["param_groups"], strict=False)):
        for key in saved:
            if key not in live and key in _settings():
                place = f"{name}.param_groups[{i}].{key}"
                yield f"{place}: the checkpoint has this setting, but the object does not"
    if type(one).__module__.startswith("torch.optim."):
        for number, value in state["state"].items():
            if not isinstance(value, Mapping):
                yield mismatch(f"{name}.state[{number}]", describe(value), "a dict")


def lacking(name: str, one: Any) -> Iterator[str]:
    """A sentence for each setting that an optimizer lacks after it has loaded a state."""
    if isinstance(one, torch.optim.Optimizer):
        for i, group in enumerate(one.param_groups):
            for key in getattr(one, "defaults", {}):
                if key not in group and key not in _IMPLEMENTATION:
                    place = f"{name}.param_groups[{i}].{key}"
                    yield f"{place}: the object has this setting, but the checkpoint does not"


@functools.cache
def _settings() -> frozenset[str]:
    """The settings that change the algorithm of one of torch's optimizers."""
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    ]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(names - _IMPLEMENTATION - {"params"})


def _of_schedule(name: str, one: Any, state: Mapping[str, Any]) -> Iterator[str]:
    live = one.state_dict()
    live_keys, saved_keys = (set(filter(_is_told, keys)) for keys in (live, state))
    for key in sorted(live_keys - saved_keys):
        yield mismatch(f"{name}.{key}", "nothing", describe(live[key]))
    # A user's own schedule can have got an attribute only when it was used.
    is_known = type(one).__module__ == torch.optim.lr_scheduler.__name__
    for key in sorted(saved_keys - live_keys) if is_known else ():
        yield mismatch(f"{name}.{key}", describe(state[key]), "nothing")
    inner = of_torch.schedules_within(one)
    if inner is not None and of_torch.SCHEDULES in live:
        states = state.get(of_torch.SCHEDULES)
        if not isinstance(states, list) or len(states) != len(inner):
            found = f"{len(states)}" if isinstance(states, list) else describe(states)
            yield mismatch(f"{name}.{of_torch.SCHEDULES}", found, f"{len(inner)} schedules")
            return
        for i, (below, saved) in enumerate(zip(inner, states, strict=True)):
            yield from _of_schedule(f"{name}.{of_torch.SCHEDULES}[{i}]", below, saved)


def _is_told(key: Any) -> bool:
    return not str(key).startswith("_") and key not in _OF_SOME_VERSIONS
