"""Calls of a Run that Python itself would not refuse, or not before the training has begun.

An error names the argument found, and the correct call. Optimizer steps outside the loop or without
the NaN policy are only warned of, once, as is a training without any: a script that forgets
`run.update` would otherwise end with exit code 0 and its initial weights.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import torch

from forge import messages
from forge.config.schema import NanAction
from forge.errors import ConfigError, ForgeError
from forge.state.registry import StateRegistry
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.update import Updater

_LOOPS = {
    "steps": "`for step, batch in run.steps(1000, loader):`",
    "epochs": "`for epoch in run.epochs(10):`, and in it `for step, batch in run.batches(loader):`",
    "batches": "`for step, batch in run.batches(loader):`",
    "loader": "`unlabelled = run.loader(other_loader)`",
}


def shown(value: Any) -> str:
    """A value in a message: a short text or number as it is, any other object by its type."""
    if isinstance(value, str | int | float | type | None):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"


EPOCHS_AFTER_A_LOOP = (
    "run.epochs() was called after another loop of this Run. Use one loop over run.epochs, or loops"
    " over run.steps; for several stages give each its own Run with a name."
)
BEGIN_AFTER_A_LOOP = (
    "run.begin() was called after another loop of this Run: call it once, before the loop; for"
    " several stages give each its own Run with a name."
)
STEPS_AND_EPOCHS = (
    "run.steps() was called in a Run that already has a loop over run.epochs. A Run cannot have"
    " both: in the loop over run.epochs write `for step, batch in run.batches(loader):`."
)
BATCHES_WITHOUT_EPOCH = (
    "run.batches() was called outside `for epoch in run.epochs(n):`, or twice in one epoch. Each"
    " epoch has one pass. For batches of a second loader use `second = run.loader(loader)` above"
    " the loop and `next(second)`; in an evaluation iterate over its loader directly."
)
FINISH_OUTSIDE_A_LOOP = (
    "run.finish() was called outside the loop over run.steps, so there is no loop to end: call it"
    " in a step, in a function of run.every, or after an epoch's pass."
)


def epoch_without_pass(epoch: int) -> str:
    """The error for an epoch that ended without its loop over `run.batches`."""
    return (
        f"Epoch {epoch} has ended without `for step, batch in run.batches(loader):`, the loop in"
        " which steps are done and counted."
    )


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


def check_function(call: str, function: Any, arguments: int) -> None:
    """Refuse a function that cannot be called with so many arguments.

    Raises:
        ForgeError: Naming the function.
    """
    if not callable(function):
        raise ForgeError(
            f"run.{call}(): expected a function, found {shown(function)}. Give the function itself,"
            f" without a call: `run.{call}(function)`, not `run.{call}(function())`."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*range(arguments))
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        takes = "the number of steps done" if arguments else "no arguments"
        raise ForgeError(
            f"run.{call}: forge calls {name} with {takes}, but its arguments are {signature}."
        ) from None


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


class OptimizerSteps:
    """Watches the steps of a run's optimizers.

    Args:
        live: The objects of the run.
        loops: The current step and loop.
        updater: Does the updates under the NaN policy.
        action: The action of that policy, for a message.
    """

    def __init__(
        self, live: StateRegistry, loops: LoopProgress, updater: Updater, action: NanAction
    ) -> None:
        self._live = live
        self._loops = loops
        self._updater = updater
        self._action = action
        self._hooks: list[Any] = []
        self._is_boundless = False
        """Whether an optimizer has stepped before the first loop."""
        self._is_unguarded = False
        """Whether an optimizer has stepped in a step without the NaN policy."""
        self._has_stepped = False

    def enter_run(self) -> None:
        """From now on optimizers should step in a loop."""
        self._watch(self._outside_loop)

    def begin_loop(self) -> None:
        """A loop begins."""
        self._watch(None if self._is_unguarded else self._in_loop)

    def close(self) -> None:
        """Remove the hooks."""
        self._watch(None)

    def _watch(self, hook: Callable[..., None] | None) -> None:
        """Call `hook` (and no earlier hook) after each optimizer step; None: no hook."""
        for one in self._hooks:
            one.remove()
        self._hooks = []
        if hook is not None:
            self._hooks += [one.register_step_post_hook(hook) for one in self._live.optimizers]

    def _outside_loop(self, *_: Any) -> None:
        self._has_stepped = True
        if not self._is_boundless:
            self._is_boundless = True
            messages.warn(
                "An optimizer steps outside `run.steps`. forge saves and stops only between two"
                " steps of that loop: write `for step in run.steps(n):`"
            )

    def _in_loop(self, *_: Any) -> None:
        """An optimizer has stepped, called by `run.update` or by the script itself."""
        self._has_stepped = True
        is_guarded = self._updater.has_updated or not self._loops.is_in_step
        if not (is_guarded or self._is_unguarded):
            self._is_unguarded = True
            messages.warn(
                f"Step {self._loops.step}: an optimizer steps, but this step called neither"
                " run.update nor run.should_step, so the NaN policy"
                f" (`resilience.nan.action={self._action.value}`) is not applied. Write"
                " `run.update(loss, optimizer)`, or step only if `run.should_step(loss)` is true"
            )

    def is_nothing_updated(self) -> bool:
        """Whether no optimizer has stepped in a whole training, though it has something to train.

        A GradScaler leaves out the steps that overflow.
        """
        objects = self._live.objects.values()
        is_scaled = any(isinstance(one, torch.amp.GradScaler) for one in objects)
        if self._has_stepped or self._updater.was_called or is_scaled or not self._loops.step:
            return False
        groups = [group for one in self._live.optimizers for group in one.param_groups]
        return any(p.requires_grad for group in groups for p in group["params"])
