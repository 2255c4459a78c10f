"""Arguments of a call that are swapped, forgotten or of another kind, each named in one sentence.

An error names the expected argument, the argument found, and the correct call. `forge.Run` runs
these checks before it does anything, so that a mistake costs no step of the training.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from forge.errors import ConfigError, ForgeError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_LOOPS = {
    "steps": "`for step, batch in run.steps(1000, loader):`",
    "epochs": "`for epoch in run.epochs(10):`, and in it `for step, batch in run.batches(loader):`",
    "batches": "`for step, batch in run.batches(loader):`",
    "loader": "`unlabelled = run.loader(other_loader)`",
}
_UPDATE = "Write `run.update(loss, optimizer)`."


def hide_unnamed(method: _Method) -> _Method:
    """Leave `*unnamed` out of the signature that `help` shows: the method takes it to refuse it."""
    signature = inspect.signature(method)
    kept = [one for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    method.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return method


def shown(value: Any) -> str:
    """A value in a message: a short text or number as it is, any other object by its type."""
    if value is None:
        return "None"
    if isinstance(value, str | int | float):
        if isinstance(value, int) and value.bit_length() > 200:
            return f"an int of {value.bit_length()} bits"
        text = repr(value)
        return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    kind = "class" if isinstance(value, type) else _kind(value)
    is_spelled = name.isupper() and name[:1] in "FHLMNRSX"  # an SGD
    article = "an" if name[:1] in "AEIOUaeio" or is_spelled else "a"
    return f"the class {name}" if kind == "class" else f"{article} {name}{kind}"


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return " (a module)"
    if isinstance(value, Optimizer) and type(value).__name__ != "Optimizer":
        return " (an optimizer)"
    return ""


# -- the loops ---------------------------------------------------------------------------------

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


def check_count(call: str, n: Any, loaders: Iterable[Any] = ()) -> None:
    """Refuse an argument that is not a number of steps or epochs.

    Args:
        call: `steps` or `epochs`.
        n: The first argument; None is checked by the caller.
        loaders: The other arguments of `run.steps`.
    Raises:
        ForgeError: Naming the argument.
    """
    if isinstance(n, SupportsIndex | float) and not isinstance(n, bool | torch.Tensor):
        number = n if isinstance(n, float) else operator.index(n)
        if number == math.inf or (number >= 0 and number % 1 == 0):
            return
        raise ForgeError(f"run.{call}({n}): expected a whole number of {call}, 0 or more.")
    is_swapped = any(isinstance(one, int) for one in loaders)
    if isinstance(n, torch.Tensor) or not hasattr(n, "__iter__") or isinstance(n, str):
        as_number = f"`run.{call}(int(n))`, for example."
        remedy = f"Write {as_number if isinstance(n, str) else _LOOPS[call]}"
    elif is_swapped:
        remedy = f"The number comes first, then the loader: {_LOOPS[call]}"
    else:
        remedy = f"Write {_LOOPS[call]}"
    raise ForgeError(
        f"run.{call}(): expected the number of {call} as the first argument, found {shown(n)}."
        f" {remedy}"
    )


def check_loader(call: str, loader: Any) -> None:
    """Refuse a loader that is not iterable.

    Raises:
        ForgeError: Naming the object found.
    """
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if is_iterable and not isinstance(loader, type | nn.Module | str):
        return
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
        step = "step" if arguments else ""
        form = f"lambda {step}: …" if name == "<lambda>" else f"def {name}({step}):"
        raise ForgeError(
            f"run.{call}: forge calls {name} with {takes}, and {name}{signature} does not take"
            f" that. Write `{form}`."
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


# -- the update --------------------------------------------------------------------------------


def check_loss(call: str, loss: Any) -> None:
    """Refuse a loss that is not a number.

    Raises:
        ForgeError: Naming the object found.
    """
    if isinstance(loss, torch.Tensor) or hasattr(loss, "__float__"):
        return
    how = _UPDATE if call == "update" else "Write `if run.should_step(loss): optimizer.step()`."
    order = "The loss comes first, then the optimizer." if isinstance(loss, Optimizer) else ""
    raise ForgeError(
        f"run.{call}(): expected the loss (a tensor or a number) as the first argument, found"
        f" {shown(loss)}. {order + ' ' if order else ''}{how}"
    )


def check_update(optimizers: Iterable[Any], schedules: Iterable[Any], scaler: Any) -> None:
    """Refuse arguments of `run.update` that are of another kind.

    Raises:
        ForgeError: Naming the argument.
    """
    for one in optimizers:
        if not (hasattr(one, "param_groups") and hasattr(one, "zero_grad")):
            raise ForgeError(
                f"run.update(): expected an optimizer as the second argument, found {shown(one)}."
                f" {_UPDATE}"
            )
    for one in schedules:
        if isinstance(one, torch.amp.GradScaler):
            raise ForgeError(
                "run.update(): expected a learning rate schedule as the third argument, found a"
                " GradScaler. Write `run.update(loss, optimizer, scaler=scaler)`."
            )
        if not hasattr(one, "step"):
            raise ForgeError(
                "run.update(): expected a learning rate schedule as the third argument, found"
                f" {shown(one)}. Write `run.update(loss, optimizer, schedule)`."
            )
    if scaler is not None and not hasattr(scaler, "unscale_"):
        raise ForgeError(
            f"run.update(scaler=…): expected a torch.amp.GradScaler, found {shown(scaler)}. Write"
            " `run.update(loss, optimizer, scaler=scaler)`."
        )


def refuse_unnamed_metrics(unnamed: tuple[Any, ...]) -> None:
    """Refuse `run.log("loss", loss)` and `run.log({"loss": loss})`.

    Raises:
        ForgeError: Saying how to write it.
    """
    if not unnamed:
        return
    first = unnamed[0]
    names = list(first) if isinstance(first, Mapping) else [first]
    name = next((one for one in names if isinstance(one, str) and one.isidentifier()), "loss")
    how = "`run.log(**metrics)`" if isinstance(first, Mapping) else f"`run.log({name}={name})`"
    raise ForgeError(
        "run.log(): expected each value with its name as a keyword, found"
        f" {shown(first)} without one. Write {how}."
    )


# -- forge.Run ---------------------------------------------------------------------------------


def check_run(policy: Any, unnamed: tuple[Any, ...], stateful: Mapping[str, Any]) -> None:
    """Refuse arguments of `forge.Run` that cannot be saved in the way they are passed.

    Raises:
        ConfigError: With a sentence for each argument.
    """
    problems = [*_policy_problems(policy, unnamed)]
    for name, one in stateful.items():
        problem = _keyword_problem(name, one)
        if problem is not None:
            problems.append(f"forge.Run({name}=…): {problem}")
    if problems:
        raise ConfigError(problems, "The call of forge.Run")


def _policy_problems(policy: Any, unnamed: tuple[Any, ...]) -> Iterable[str]:
    is_object = isinstance(policy, nn.Module | Optimizer | type)
    if is_object:
        yield (
            f"expected the policy as the first argument, found {shown(policy)}. Write"
            f" `forge.Run(cfg.resilience, {_name_for(policy)}={_name_for(policy)})`; without a"
            " config, `forge.Run(None, …)` has the default policy."
        )
    elif isinstance(policy, str):
        yield (
            f"expected the policy as the first argument, found {shown(policy)}. A policy is a"
            " mapping, such as `cfg.resilience` or {'checkpoint': {'dir': 'checkpoints'}}; a YAML"
            " file is read by `OmegaConf.load(path)`."
        )
    if unnamed:
        kinds = ", ".join(map(shown, unnamed))
        names = ", ".join(f"{name}={name}" for name in map(_name_for, unnamed))
        yield (
            f"expected every object with a name, which the checkpoint uses, found {kinds} without"
            f" one. Write `forge.Run({'cfg.resilience' if not is_object else '…'}, {names})`."
        )


def _name_for(one: Any) -> str:
    kinds = ((nn.Module, "model"), (Optimizer, "optimizer"), (torch.amp.GradScaler, "scaler"))
    return next((name for kind, name in kinds if isinstance(one, kind)), "schedule")


def _keyword_problem(name: str, one: Any) -> str | None:
    """The problem of an object to be saved, or None."""
    if name == "policy" and not hasattr(one, "state_dict"):  # reinforcement learning has networks
        return "the policy is the first argument and has no name: `forge.Run(policy, model=model)`."
    if one is None:
        return f"expected an object to save, found None. Leave `{name}` out if there is none."
    if isinstance(one, type):
        return f"expected an instance, found {shown(one)} itself. Write `{name}={one.__name__}(…)`."
    if _is_state_dict(one):
        return (
            "found a state dict, which is a copy of the values: forge could not put them back into"
            f" the object. Give the object itself: `{name}={name}`, not"
            f" `{name}={name}.state_dict()`."
        )
    if isinstance(one, torch.utils.data.DataLoader):  # with a state, it would be restored twice
        return (
            f"found {shown(one)}. The loop saves the position in its data: leave the loader out"
            f" here, and write {_LOOPS['steps']}"
        )
    if isinstance(one, str | bytes | int | float | bool):
        key = _policy_key(name)
        if key is not None:
            return (
                f"is a key of the policy, not an object to save. Set it there: `resilience.{key}`"
                f" in the config, or {_nested(key, one)} in a policy that is a mapping."
            )
        return (
            f"expected an object with a state_dict, found {shown(one)}. A value that changes during"
            f" training is kept in run.state: `run.state[{name!r}] = …`; the settings of the job"
            " are given as `config=`."
        )
    return None


def _is_state_dict(one: Any) -> bool:
    if not isinstance(one, Mapping) or not one:
        return False
    if set(one) == {"state", "param_groups"}:
        return True
    return all(isinstance(v, torch.Tensor) for v in one.values())


def _policy_key(name: str) -> str | None:
    """The policy's key that a keyword most likely means: `checkpoint_dir`, `every_steps`."""
    from forge.config.conversion import known_keys

    keys = known_keys()
    exact = [key for key in keys if key.replace(".", "_") == name]
    last = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    found = exact or last
    return found[0] if len(found) == 1 else None


def _nested(key: str, value: Any) -> str:
    head, _, rest = key.partition(".")
    inner = _nested(rest, value) if rest else repr(value)
    return f"{{{head!r}: {inner}}}"


def number(name: str, value: Any) -> float:
    """A logged value as a float.

    Raises:
        ForgeError: If it is larger than a float can be.
    """
    try:
        return float(value)
    except OverflowError:
        raise ForgeError(
            f"run.log({name}=…): expected a number that fits in a float (at most about 1.8e308),"
            f" found {shown(value)}. Log its logarithm, for example"
            f" `run.log({name}=math.log({name}))`."
        ) from None
