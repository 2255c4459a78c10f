"""The structure of a run's objects: the names and shapes of their leaves, and their groups.

The next start builds the objects as this one did. A structure that the loop has changed could be
saved, but not loaded. So forge compares it with the initial structure before each save, and refuses
a change while the job still runs. Not compared: keys that a module loads in its own way, state that
an optimizer creates when it steps, and the state of objects that are neither modules nor
optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from forge.compat import of_torch
from forge.errors import ConfigError
from forge.state import module_state

_SHOWN = 8
"""Number of differences that one error lists."""

_NO_MODULE = "a parameter of no module"

_ADVICE = (
    "A checkpoint with this change could not be loaded, because the next start of the script builds"
    " the objects without it. Change them before forge.Run is entered; or end this training, and"
    " give the changed objects to another Run (with its own `name=`). To train parameters later,"
    " give the optimizer all of them at the start, with requires_grad_(False) until then."
)


@dataclass(frozen=True)
class Structure:
    """The structure that is compared."""

    leaves: dict[str, str]
    """Name of each leaf in a module's state -> dtype and shape."""
    order: dict[str, list[list[str]]]
    """By optimizer and group, the names of its parameters."""
    own: tuple[str, ...] = ()
    """Prefixes of names that a module loads in its own way; only of the initial structure."""


def built(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Structure:
    """The initial structure: that of `of`, with the keys that may change."""
    modules = [(name, one) for name, one in objects.items() if isinstance(one, nn.Module)]
    return replace(
        of(objects, states),
        own=tuple(f"{n}.{p}" for n, one in modules for p in module_state.own_ways(one)),
    )


def of(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Structure:
    """The current structure of objects.

    Args:
        objects: By name.
        states: The current results of their `state_dict`.
    """
    modules = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
    return Structure(
        leaves={
            f"{name}.{key}": "" if _is_extra(key) else module_state.describe(leaf)
            for name in modules
            for key, leaf in states[name].items()
        },
        order=orders(objects),
    )


def _is_extra(key: Any) -> bool:
    return str(key).rpartition(".")[2] == of_torch.EXTRA_STATE


def orders(objects: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """By optimizer and group, the names of parameters: the state itself only has numbers."""
    names: dict[int, str] = {}
    for name, one in objects.items():
        if isinstance(one, nn.Module):
            for full, p in one.named_parameters(prefix=name, remove_duplicate=False):
                names[id(p)] = min(full, names.get(id(p), full))
    return {
        name: [[names.get(id(p), "") for p in group["params"]] for group in one.param_groups]
        for name, one in objects.items()
        if isinstance(one, torch.optim.Optimizer)
    }


def check(first: Structure, now: Structure) -> None:
    """Refuse changes by the loop, before they are saved.

    Raises:
        ConfigError: Names the initial structure and the present one.
    """
    problems = [
        sentence
        for sentence in _module_differences(first, now)
        if not (first.own and sentence.startswith(first.own))
    ]
    for name, groups in first.order.items():
        problems += _group_differences(name, groups, now.order[name])
    refuse(problems)


def refuse(problems: list[str]) -> None:
    """Raise if there are any problems.

    Raises:
        ConfigError: Names the first of them, and the remedy.
    """
    if problems:
        more = len(problems) - _SHOWN
        shown = problems[:_SHOWN] + ([f"… and {more} more"] if more > 0 else [])
        raise ConfigError([*shown[:-1], f"{shown[-1]}. {_ADVICE}"], "The training loop")


def _group_differences(name: str, first: list[list[str]], now: list[list[str]]) -> Iterator[str]:
    if len(first) != len(now):
        yield _changed(name, f"{len(first)} parameter groups", f"{len(now)}")
    for i, (was, found) in enumerate(zip(first, now, strict=False)):
        if len(was) != len(found):
            yield _changed(f"{name}.param_groups[{i}]", f"{len(was)} parameters", f"{len(found)}")
    for place, was_name, is_name in order_differences(first, now):
        yield _changed(f"{name}.{place}", was_name, is_name)


def _module_differences(first: Structure, now: Structure) -> Iterator[str]:
    for name in {**first.leaves, **now.leaves}:
        was, found = first.leaves.get(name), now.leaves.get(name)
        if was != found:
            yield _changed(name, was or "nothing", found or "nothing")


def order_differences(
    expected: list[list[str]], found: list[list[str]]
) -> Iterator[tuple[str, str, str]]:
    """For each group of the same size, the first place where parameters differ, with both names."""
    for i, (group, found_group) in enumerate(zip(expected, found, strict=False)):
        if len(group) == len(found_group) and group != found_group:
            pairs = enumerate(zip(group, found_group, strict=True))
            j, was, is_now = next((j, a, b) for j, (a, b) in pairs if a != b)
            yield f"param_groups[{i}][{j}]", was or _NO_MODULE, is_now or _NO_MODULE


def _changed(name: str, first: str, now: str) -> str:
    return f"{name}: {first} at the start, {now} now"
