"""Warns of optimizer steps outside the loop or without the NaN policy, and of missing steps.

Each warning is logged once. Otherwise a script that forgets `run.update` would end with exit code 0
and its initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from forge import messages
from forge.checkpoint.format import shards, tensor_encoding
from forge.config.schema import NanAction
from forge.state.registry import StateRegistry
from forge.training.loop.loop_progress import LoopProgress
from forge.training.nan.update import Updater

_SAMPLE = 256
"""Elements of each parameter that are compared, roughly."""


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
        self._before: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Parameters, and a part of each as it was when the first loop began."""

    def enter_run(self) -> None:
        """From now on optimizers should step in a loop."""
        self._watch(self._outside_loop)

    def begin_loop(self) -> None:
        """A loop begins."""
        self._watch(None if self._is_unguarded else self._in_loop)
        if self._before is None:
            groups = [group for one in self._live.optimizers for group in one.param_groups]
            parameters = [p for group in groups for p in group["params"]]
            self._before = [(p, _sample(p).clone()) for p in parameters if _is_comparable(p)]

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
        """Whether a whole training has changed no parameter.

        Calls are not enough: a CUDA graph that is replayed steps without any call of Python's. A
        GradScaler leaves out the steps that overflow.
        """
        objects = self._live.objects.values()
        is_scaled = any(isinstance(one, torch.amp.GradScaler) for one in objects)
        if self._has_stepped or self._updater.was_called or is_scaled:
            return False
        if not (self._loops.step and self._before):
            return False
        return all(torch.equal(_sample(p), before) for p, before in self._before)


def _is_comparable(parameter: torch.Tensor) -> bool:
    if not parameter.requires_grad or tensor_encoding.is_lazy(parameter):
        return False
    local = shards.local(parameter)
    return local.layout is torch.strided and local.numel() > 0 and not local.is_meta


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    local = shards.local(parameter).detach()
    size = max(1, math.ceil(_SAMPLE ** (1 / max(1, local.dim()))))
    view: torch.Tensor = local[(slice(size),) * local.dim()]
    return view  # a view: nothing large is copied
