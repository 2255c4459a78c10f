"""Watches optimizers' steps: two in one step, one that is not saved, and none in a whole training.

A script that forgets `run.update` would otherwise end with exit code 0 and its initial weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from forge import messages
from forge.errors import ConfigError
from forge.state import unregistered
from forge.state.registry import StateRegistry
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.update import Updater

_MOST = 16
"""Optimizers that are checked: a step can create an optimizer for a copy of the weights."""
_SHOWN = 3


class OptimizerSteps:
    """Watches the steps of all optimizers.

    Args:
        live: The objects of the run.
        loops: The current step and loop.
        updater: Does the updates under the NaN policy.
    """

    def __init__(self, live: StateRegistry, loops: LoopProgress, updater: Updater) -> None:
        self._live = live
        self._loops = loops
        self._updater = updater
        self._hook: Any = None
        self._steps: dict[int, tuple[int, bool]] = {}
        """By `id` of an optimizer: the step in which it stepped last, and if by `run.update`."""
        self._is_twice = False
        self._has_stepped = False
        self._registered = set(map(id, live.optimizers))
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._num_checked = 0

    def enter_run(self, giving_up: Callable[[], AbstractContextManager[None]]) -> None:
        """Watch optimizers' steps from now on.

        Args:
            giving_up: In its block, a ConfigError ends the job.
        """
        self._giving_up = giving_up
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._registered:
            self._check_registered(optimizer)
        elif self._loops.is_in_step and self._num_checked < _MOST:
            self._check_other(optimizer)

    def _check_registered(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if `run.update` and the script both step an optimizer in one step."""
        self._has_stepped = True
        step, is_update = self._loops.step, self._updater.is_stepping
        is_twice = self._loops.is_in_step and self._steps.get(id(optimizer)) == (
            step,
            not is_update,
        )
        self._steps[id(optimizer)] = step, is_update
        if is_twice and not self._is_twice:
            self._is_twice = True
            messages.warn(
                f"The optimizer stepped twice in step {step}: remove `optimizer.step()`, since"
                " run.update steps it"
            )

    def _check_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that trains registered parameters and is not saved."""
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        self._num_checked += 1
        trained = set(map(id, _parameters(optimizer)))
        names = [name for name, p in self._live.parameters() if id(p) in trained]
        if names and not unregistered.is_held(optimizer, self._live.objects):
            problem = (
                f"the optimizer {type(optimizer).__name__} trains"
                f" {messages.truncate_list(names, _SHOWN)}, but its state is not saved. Give it to"
                " forge.Run, as in forge.Run(…, optimizer=optimizer)."
            )
            with self._giving_up():
                raise ConfigError([problem], f"Step {self._loops.step}")

    def is_nothing_updated(self) -> bool:
        """Whether no optimizer has stepped in a whole training, though it has something to train.

        A GradScaler leaves out the steps that overflow.
        """
        objects = self._live.objects.values()
        is_scaled = any(isinstance(one, torch.amp.GradScaler) for one in objects)
        if self._has_stepped or self._updater.was_called or is_scaled or not self._loops.step:
            return False
        return any(p.requires_grad for one in self._live.optimizers for p in _parameters(one))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
