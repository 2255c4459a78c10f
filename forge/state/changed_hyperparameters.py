"""Adapts saved hyperparameters if a job continues with a changed config.

Values that the script now builds differently replace the saved ones; all others stay as training
has changed them. A learning rate that a schedule has changed becomes the rate that the new schedule
reaches after the same number of steps.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from forge.compat import of_torch
from forge.errors import ConfigError
from forge.jobdir.config_changes import Change, changes
from forge.state.initial_hyperparameters import InitialHyperparameters, key_of, leaves, values

_SET_BACK = "Set it back, or start in a new directory."
_CYCLED = ("momentum", "betas")
"""Settings that a schedule with `cycle_momentum` changes in addition to the rate."""


class ChangedHyperparameters:
    """The hyperparameters that the script builds differently than at a save.

    Args:
        built: Those that it builds now.
        recorded: The record of those it built then.
    """

    def __init__(self, built: InitialHyperparameters, recorded: dict[str, Any]) -> None:
        self._objects = built.objects
        self._fresh = built.fresh
        self._recorded = recorded
        both = [name for name in built.record if name in recorded]
        found = {name: changes(recorded[name], built.record[name]) for name in both}
        self._since = {name: changed for name, changed in found.items() if changed}
        """The differences, by object."""

    def kept(self) -> list[Change]:
        """Hyperparameters that loading restores although the script builds other values now."""
        return [
            one
            for name, changed in self._since.items()
            if name in self._fresh
            for one in named(name, changed)
        ]

    def check(self) -> None:
        """Raise ConfigError if `adapt` cannot apply a change; names the changes."""
        since, problems = self._since, []
        for name, changed in since.items():
            why = self._undecided(name, {one.key for one in changed})
            # For another class or other groups, single values mean nothing.
            whole = [one for one in changed if one.key in ("(class)", "(groups)")]
            if why:
                problems += [f"{one}: {why}" for one in named(name, whole or changed)]
        if problems:
            raise ConfigError(problems, "`resilience.resume=changed`")

    def _undecided(self, name: str, keys: set[str]) -> str | None:
        one = self._objects[name]
        if "(class)" in keys:
            return (
                "one class cannot load the state of another. Use the class of the saved state, or"
                " start in a new directory."
            )
        if "(groups)" in keys:
            return (
                "the new parameter groups cannot be matched to the saved ones. Keep their number."
            )
        if isinstance(one, torch.optim.Optimizer):
            schedules = self._schedules_of(one)
            is_driven = any(key.rpartition(".")[2] in ("lr", "initial_lr") for key in keys)
            is_repeated = any(
                s in self._since and _steps_alone(self._objects[s]) for s in schedules
            )
            if is_driven and schedules and not is_repeated:
                return (
                    f"`{schedules[0]}` has already changed this value, and forge cannot compute the"
                    f" present value from the new initial value. {_SET_BACK}"
                )
        elif isinstance(one, LRScheduler):
            if not _steps_alone(one):
                return (
                    f"a {type(one).__qualname__} is stepped with an argument, such as a metric, so"
                    f" forge cannot compute the rate with the new settings. {_SET_BACK}"
                )
            if len(self._schedules_of(one.optimizer)) > 1:
                return "several schedules change the rate of one optimizer. Chain them into one."
            if self._name_of(one.optimizer) is None:
                return "its optimizer was not given to forge.Run."
        elif name not in self._fresh:
            return (
                "forge can change saved values only of optimizers, learning rate schedules and"
                f" GradScalers, not of a {type(one).__qualname__}. {_SET_BACK}"
            )
        return None

    def _schedules_of(self, optimizer: Any) -> list[str]:
        schedules = [(n, o) for n, o in self._objects.items() if isinstance(o, LRScheduler)]
        return [name for name, one in schedules if one.optimizer is optimizer]

    def _name_of(self, optimizer: Any) -> str | None:
        return next((name for name, one in self._objects.items() if one is optimizer), None)

    def adapt(self, states: dict[str, Any]) -> list[Change]:
        """Replace changed values in saved states, by object; load the states afterwards.

        Returns:
            The values that differ from the saved ones.
        Raises:
            ConfigError: Like `check`, or if a state has another structure than the object's.
        """
        self.check()
        since = self._since
        names = [n for n in self._fresh if n in states and n in self._recorded]
        before = {name: values(states[name]) for name in names}
        for name in names:
            if not isinstance(self._objects[name], LRScheduler):
                self._put(name, states[name], {one.key for one in since.get(name, ())})
        for name in names:
            one = self._objects[name]
            if isinstance(one, LRScheduler) and (name in since or self._has_functions(name)):
                self._replay(name, one, states)
        return [
            change
            for name in names
            for change in named(name, changes(before[name], values(states[name])))
        ]

    def _put(self, name: str, saved: dict[str, Any], keys: set[str]) -> None:
        for path, _ in leaves(self._fresh[name]):
            if key_of(path) in keys:
                target, source = saved, self._fresh[name]
                try:
                    for part in path[:-1]:
                        target, source = target[part], source[part]
                    target[path[-1]] = copy.deepcopy(source[path[-1]])
                except (KeyError, IndexError, TypeError) as error:
                    text = f"{name}.{key_of(path)}: the checkpoint has no such value ({error!r})."
                    raise ConfigError([text], "`resilience.resume=changed`") from error

    def _has_functions(self, name: str) -> bool:
        """Whether the rate depends on functions of the script, which are not in the state."""
        one = self._objects[name]
        is_alone = len(self._schedules_of(one.optimizer)) == 1 and self._name_of(one.optimizer)
        return _holds_functions(self._fresh[name]) and bool(is_alone) and _steps_alone(one)

    def _replay(self, name: str, schedule: LRScheduler, states: dict[str, Any]) -> None:
        """Step the newly built schedule as often as the saved one was stepped."""
        owner = self._name_of(schedule.optimizer)
        assert owner is not None
        fresh = self._fresh[owner]["param_groups"]
        live = schedule.optimizer.param_groups
        for group, first in zip(live, fresh, strict=False):  # the loop can have added groups
            group.update(copy.deepcopy(first))
        num_steps = _steps(states[name]) - _steps(self._fresh[name])
        try:
            schedule.load_state_dict(copy.deepcopy(self._fresh[name]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that optimizer.step() was not called before
                for _ in range(num_steps):
                    schedule.step()
        except Exception as error:  # the schedule can be the user's own
            problem = f"{name}: the new schedule fails within {num_steps} steps: {error}"
            raise ConfigError([problem], "`resilience.resume=changed`") from error
        states[name] = copy.deepcopy(schedule.state_dict())
        cycled = _CYCLED if getattr(schedule, "cycle_momentum", False) else ()
        for group, first, saved in zip(live, fresh, states[owner]["param_groups"], strict=False):
            for key in first:
                if key in ("lr", *cycled) or values([group[key]]) != values([first[key]]):
                    saved[key] = copy.deepcopy(group[key])


def named(name: str, changed: list[Change]) -> list[Change]:
    """Changes with the object's name, without counters and caches."""
    shown = [one for one in changed if not any(p.startswith("_") for p in one.key.split("."))]
    return [Change(f"{name}.{one.key}", one.before, one.now) for one in shown or changed]


def _steps_alone(schedule: Any) -> bool:
    """Whether a schedule can be stepped without arguments."""
    parameters = inspect.signature(schedule.step).parameters.values()
    return all(one.default is not one.empty for one in parameters)


def _holds_functions(state: dict[str, Any]) -> bool:
    """Whether a schedule, or one inside it, is a LambdaLR or similar."""
    inner = state.get(of_torch.SCHEDULES, ())
    return None in state.get("lr_lambdas", ()) or any(map(_holds_functions, inner))


def _steps(state: dict[str, Any]) -> int:
    known = "last_epoch" in state
    return int(state["last_epoch"]) if known else _steps(state[of_torch.SCHEDULES][0])
