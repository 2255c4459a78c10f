"""Warns of optimizer steps outside the loop, without the NaN policy or twice, and of missing steps.

It also warns of steps by a GradScaler that is not saved, and refuses an optimizer that trains and
is not saved. Each warning is logged once. Otherwise a script that forgets `run.update` would end
with exit code 0 and its initial weights.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from forge import messages
from forge.config.schema import NanAction
from forge.errors import ConfigError
from forge.state import unregistered
from forge.state.registry import StateRegistry
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.update import Updater

_DEPTH = 8
"""Frames between a hook and a GradScaler: torch's wrappers of Optimizer.step, and schedules'."""
_MOST = 16
"""Optimizers that are checked: a step can create an optimizer for a copy of the weights."""
_SHOWN = 3


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
        self._own_step: int | None = None
        """The step in which the script has stepped an optimizer, and called nothing yet."""
        self._steps: dict[int, tuple[int, bool]] = {}
        """By `id` of an optimizer: the step in which it stepped last, and if by `run.update`."""
        self._is_twice = False
        self._has_stepped = False
        self._is_scaler_checked = False
        self._registered = set(map(id, live.optimizers))
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._num_checked = 0

    def enter_run(self, giving_up: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on optimizers should step in a loop.

        Args:
            giving_up: In its block, a ConfigError ends the job.
        """
        self._giving_up = giving_up
        self._watch(self._outside_loop)

    def begin_loop(self) -> None:
        """A loop begins."""
        self._name_unguarded()
        self._watch(None if self._is_unguarded else self._in_loop)
        self._hooks.append(register_optimizer_step_post_hook(self._of_any))

    def close(self) -> None:
        """Remove the hooks."""
        self._name_unguarded()
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

    def _in_loop(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped, called by `run.update` or by the script itself."""
        self._has_stepped = True
        step, is_update = self._loops.step, self._updater.is_stepping
        if self._own_step != step:
            self._name_unguarded()
        if self._loops.is_in_step and self._steps.get(id(optimizer)) == (step, not is_update):
            self._name_twice(step)
        self._steps[id(optimizer)] = step, is_update
        if not self._is_scaler_checked:
            self._is_scaler_checked = True
            self._check_scaler()
        is_guarded = self._updater.has_updated or not self._loops.is_in_step
        if not (is_guarded or self._is_unguarded) and self._own_step is None:
            self._own_step = step  # a call of run.update can follow in this step

    def _name_unguarded(self) -> None:
        """Warn of the last step if the script has stepped an optimizer and called nothing."""
        step, self._own_step = self._own_step, None
        if step is None or self._is_twice:
            return
        self._is_unguarded = True
        messages.warn(
            f"Step {step}: an optimizer steps, but this step called neither run.update nor"
            f" run.should_step, so the NaN policy (`resilience.nan.action={self._action.value}`) is"
            " not applied. Write `run.update(loss, optimizer)`, or step only if"
            " `run.should_step(loss)` is true"
        )

    def _name_twice(self, step: int) -> None:
        self._own_step = None
        if not self._is_twice:
            self._is_twice = True
            messages.warn(
                f"The optimizer stepped twice in step {step}: remove `optimizer.step()`, since"
                " run.update steps it"
            )

    def _of_any(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped, whether it is registered or not."""
        if id(optimizer) in self._registered or self._num_checked == _MOST:
            return
        if optimizer in self._checked or not self._loops.is_in_step:
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

    def _check_scaler(self) -> None:
        """Warn if a GradScaler that is not saved has called the optimizer."""
        # An optimizer does not know its scaler, and a scaler knows its optimizers only by their id.
        from forge.training.loop.own_iterators import locals_of  # only at the first update

        frame, depth = inspect.currentframe(), 0
        while frame is not None and depth < _DEPTH:
            scaler = locals_of(frame).get("self")
            if isinstance(scaler, torch.amp.GradScaler):
                is_saved = unregistered.is_held(scaler, self._live.objects)
                if scaler.is_enabled() and not is_saved:
                    messages.warn(
                        "A resume could be inexact here: a GradScaler steps the optimizer, but its"
                        " scale is not saved. Give it to forge.Run, as in"
                        " forge.Run(…, scaler=scaler)"
                    )
                return
            frame, depth = frame.f_back, depth + 1

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
