"""Calls of a Run that Python itself would not refuse, or not before the training has begun.

An error names the argument found, and the correct call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch

from forge.errors import ConfigError, ForgeError

_LOOPS = {
    "steps": "`for step, batch in run.steps(1000, loader):`",
    "epochs": "`for epoch in run.epochs(10):`, and in it `for step, batch in run.batches(loader):`",
    "batches": "`for step, batch in run.batches(loader):`",
}


def shown(value: Any) -> str:
    """A value in a message: a short text or number as it is, any other object by its type."""
    if isinstance(value, str | int | float | type | None):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"


EPOCHS_AFTER_A_LOOP = (
    "run.epochs() was called after another loop of this Run: for several stages"
    " give each its own Run with a name."
)
BEGIN_AFTER_A_LOOP = (
    "run.begin() was called after another loop of this Run: for several stages"
    " give each its own Run with a name."
)
STEPS_AND_EPOCHS = (
    "run.steps() was called in a Run that already has a loop over run.epochs: use run.batches."
)
BATCHES_WITHOUT_EPOCH = (
    "run.batches() was called outside `for epoch in run.epochs(n):`, or twice in one epoch: each"
    " epoch has one pass."
)
FINISH_OUTSIDE_A_LOOP = (
    "run.finish() was called outside the loop over run.steps, so there is no loop to end."
)


def epoch_without_pass(epoch: int) -> str:
    """The error for an epoch that ended without its loop over `run.batches`."""
    return f"Epoch {epoch} has ended without `for step, batch in run.batches(loader):`."


def check_boundary(step: int, last: int, *, is_open: bool) -> None:
    """Check the step of a call of `run.boundary`.

    Args:
        last: The step of the call before.
        is_open: Whether a loop of `run.begin` is under way.
    Raises:
        ForgeError: Names the remedy.
    """
    if not is_open:
        raise ForgeError(
            "run.boundary() was called outside a loop: call `start = run.begin()` first. Do not"
            " call it if `start.is_finished`, and not after it has returned True or after"
            " run.end_loop()."
        )
    if isinstance(step, bool) or not isinstance(step, int) or step <= last:
        raise ForgeError(
            f"run.boundary({step!r}): expected the number of steps done, more than the {last} of"
            " the last call. Each call ends one step: if gradients are accumulated, count batches,"
            " not updates of the optimizer."
        )


def check_count(call: str, n: Any) -> None:
    """Refuse an argument that is not a number of steps or epochs.

    Args:
        call: `steps` or `epochs`.
        n: The first argument; None is checked by the caller.
    Raises:
        ForgeError: Naming the argument.
    """
    if isinstance(n, SupportsIndex | float) and not isinstance(n, bool | torch.Tensor):
        number = n if isinstance(n, float) else operator.index(n)
        if number == math.inf or (number >= 0 and number % 1 == 0):
            return
    raise ForgeError(
        f"run.{call}(): expected the number of {call} (a whole number, 0 or more) as the first"
        f" argument, found {shown(n)}. Write {_LOOPS[call]}"
    )


def check_loader(call: str, loader: Any) -> None:
    """Refuse a loader that is not iterable.

    Raises:
        ForgeError: Naming the object found.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ForgeError(
            f"run.{call}(): expected a DataLoader or another iterable of batches, found"
            f" {shown(loader)}. Write {_LOOPS[call]}"
        )


def check_function(call: str, function: Any) -> None:
    """Refuse an argument that is not a function.

    Raises:
        ForgeError: Naming the function.
    """
    if not callable(function):
        raise ForgeError(
            f"run.{call}(): expected a function, found {shown(function)}. Give the function itself,"
            f" without a call: `run.{call}(function)`, not `run.{call}(function())`."
        )


def check_interval(steps: Any) -> None:
    """Refuse `@run.every` without parentheses, which would register nothing.

    Raises:
        ForgeError: Saying how to write it.
    """
    if callable(steps):
        name = getattr(steps, "__name__", "function")
        raise ForgeError(
            f"run.every: expected a number of steps, found the function {name}. Write"
            f" `@run.every(500)` above `def {name}(step):`."
        )


def check_given(stateful: Mapping[str, Any]) -> None:
    """Refuse arguments of `forge.Run` that have a state and are no objects to save.

    Raises:
        ConfigError: With a sentence for each argument.
    """
    problems = []
    for name, one in stateful.items():
        if isinstance(one, torch.utils.data.DataLoader):  # it would be restored twice
            problems.append(
                f"forge.Run({name}=…): found {shown(one)}. The loop saves the position in its data:"
                f" leave the loader out here, and write {_LOOPS['steps']}"
            )
        elif name == "policy" and not hasattr(one, "load_state_dict"):  # a network can be called so
            problems.append(
                "forge.Run(policy=…): the policy is the first argument and has no name:"
                " `forge.Run(policy, model=model)`."
            )
    if problems:
        raise ConfigError(problems, "The call of forge.Run")
