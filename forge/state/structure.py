"""The structure of a run's objects: their parameters, groups, and shared memory.

The next start builds the objects as this one did. A structure that the loop has changed could be
saved, but not loaded. So forge compares it with the initial structure before each save, and refuses
a change while the job still runs. Not compared: keys that a module loads in its own way, state that
an optimizer creates when it steps, and the state of objects that are neither modules nor
optimizers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from forge.compat import of_torch
from forge.errors import ConfigError
from forge.state import module_state, sharing, unregistered

_SHOWN = 8
"""Number of differences that one error lists."""

_NO_MODULE = "a parameter of no module"

_ADVICE = (
    "A checkpoint with this change could not be loaded, because the next start of the script builds"
    " the objects without it. Change them before forge.Run is entered; or end this training, and"
    " give the changed objects to another Run (with its own `name=`)."
)


@dataclass(frozen=True)
class Structure:
    """The structure that is compared."""

    leaves: dict[str, str]
    """Name of each leaf in a module's state -> dtype and shape."""
    order: dict[str, list[list[str]]]
    """By optimizer and group, the names of its parameters."""
    names: set[str]
    """The tensors of modules, and the parameters without a module."""
    tied: list[list[str]]
    """Names that share memory."""
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
    named = list(_named(objects, states))
    return Structure(
        leaves={
            f"{name}.{key}": "" if _is_extra(key) else module_state.describe(leaf)
            for name in modules
            for key, leaf in states[name].items()
        },
        order=orders(objects),
        names={name for name, _ in named},
        tied=sharing.groups(named),
    )


def _is_extra(key: Any) -> bool:
    return str(key).rpartition(".")[2] == of_torch.EXTRA_STATE


def _named(
    objects: Mapping[str, Any], states: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the states of modules, and parameters without a module."""
    in_modules: set[int] = set()
    for name, one in objects.items():
        if isinstance(one, nn.Module):
            for path, module in one.named_modules(remove_duplicate=False):
                for key, tensor in module_state.tensors(module).items():
                    in_modules.add(id(tensor))
                    full = f"{path}.{key}" if path else key
                    if full in states[name]:
                        yield f"{name}.{full}", tensor
    for name, one in objects.items():
        if isinstance(one, torch.optim.Optimizer):
            for place, parameter in unregistered.with_paths(one):
                if id(parameter) not in in_modules:
                    yield f"{name}.{place}", parameter


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
        for place, was, found in order_differences(groups, now.order[name]):
            problems.append(_changed(f"{name}.{place}", was, found))
    for a, b, was_tied in sharing.differences(first.tied, now.tied, now.names):
        if not (first.own and a.startswith(first.own)):
            remedy = "" if was_tied else "; a .clone() keeps them apart"
            problems.append(_changed(f"{a} and {b}", *tied_in_words(was_tied=was_tied)) + remedy)
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


def refuse_groups(
    name: str,
    groups: list[list[torch.Tensor]],
    now: list[list[torch.Tensor]],
    names: list[list[str]],
) -> None:
    """Raise if an optimizer has other parameters than at the start, or another order of them.

    Args:
        name: The optimizer.
        groups: The parameters of each group at the start.
        now: The same now.
        names: The names of those at the start.
    Raises:
        ConfigError: Names the group.
    """
    if len(now) != len(groups):
        text = (
            f"{_changed(name, f'{len(groups)} parameter groups', f'{len(now)}')}. A checkpoint"
            " with a group added inside the loop could not be loaded, because the next start"
            " builds the optimizer without it. Give the optimizer all parameters at the start,"
            " with requires_grad_(False) for those to be trained later, and call"
            " requires_grad_(True) where you call add_param_group now."
        )
        raise ConfigError([text], "The training loop")
    for i, (before, after) in enumerate(zip(groups, now, strict=True)):
        if len(before) != len(after) or not all(map(operator.is_, before, after)):
            refuse([_other_group(f"{name}.param_groups[{i}]", before, after, names[i])])


def _other_group(
    group: str, before: list[torch.Tensor], after: list[torch.Tensor], names: list[str]
) -> str:
    if len(before) != len(after):
        return _changed(group, f"{len(before)} parameters", f"{len(after)}")
    j = next(j for j, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b)
    return _changed(f"{group}[{j}]", names[j] or _NO_MODULE, "another parameter")


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


def tied_in_words(*, was_tied: bool) -> tuple[str, str]:
    """Whether two names share one tensor, at first and now, in words."""
    one, two = "one tensor under both names (tied)", "two tensors"
    return (one, two) if was_tied else (two, one)


def _changed(name: str, first: str, now: str) -> str:
    return f"{name}: {first} at the start, {now} now"
