"""Warns of optimizer steps outside the loop or without the NaN policy, and of missing steps.

Each warning is logged once. Otherwise a script that forgets `run.update` would end with exit code 0
and its initial weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forge import messages
from forge.config.schema import NanAction
from forge.state.registry import StateRegistry
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.update import Updater


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
