"""Whether the state that all ranks have alike is still that of the boundary, in mid-step.

Only what torch itself lets see is taken for unchanged: parameters that DDP keeps equal, optimizers
and schedules of torch, buffers that stay what they are. Whatever else is given to the Run, or has a
way of its own to say its state, is refused, since half a step in it would be saved in silence.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from forge.checkpoint.save.digest import digest
from forge.compat import of_torch
from forge.state import module_state
from forge.state.registry import StateRegistry

_MOST = 64 << 20
"""Bytes of buffers, and of parameters that are not trained, of which a digest is taken."""


class StepChanges:
    """Looks at each boundary, and once more where a step has broken off.

    Args:
        live: The objects of the run.
    """

    def __init__(self, live: StateRegistry) -> None:
        self._live = live
        objects = live.objects.items()
        self._models = {n: o for n, o in objects if isinstance(o, torch.nn.Module)}
        self._schedules = [one for _, one in objects if isinstance(one, LRScheduler)]
        self._optimizers = live.optimizers
        self._modules = [m for one in self._models.values() for m in one.modules()]
        self._trained = [p for p in self._parameters() if p.requires_grad]
        self._hooks: list[Any] = []
        self._has_begun = self._had_gradients = False
        """Whether an optimizer has stepped; whether gradients were kept over the boundary."""
        self._mark: list[Any] = []
        self._passes: list[int] = []
        self._options: list[dict[str, Any]] = []
        self._training: list[bool] = []
        self._resting = ""
        """Of what is not trained, as it was at the first boundary."""

    def _parameters(self) -> list[torch.Tensor]:
        return [p for one in self._models.values() for p in one.parameters()]

    def _others(self) -> list[torch.Tensor]:
        """What of the models is not trained: the same throughout, or nothing is certain."""
        buffers = [b for one in self._models.values() for b in one.buffers()]
        return buffers + [p for p in self._parameters() if not p.requires_grad]

    def problem(self) -> str:
        """Why the state of this run can never be taken for unchanged; empty where it can."""
        for name, one in self._live.objects.items():
            kind = type(one).__name__
            if isinstance(one, DistributedDataParallel):
                if one.process_group is not dist.group.WORLD:
                    return f"{name}: its process group is not that of all ranks"
                if module_state.own_ways(one) or any(map(of_torch.saves_otherwise, one.modules())):
                    return f"{name} has a module with a way of its own to save its state"
            elif isinstance(one, torch.nn.Module):
                return f"{name}, a {kind}, is not in DistributedDataParallel"
            elif not isinstance(one, torch.optim.Optimizer | LRScheduler):
                return f"{name}, a {kind}, may change in a step"
            elif not type(one).__module__.startswith("torch.optim."):
                return f"{name}, a {kind}, is none of torch's own"
        held = {id(p) for p in self._parameters()}
        if any(id(p) not in held for p in _params(self._optimizers)):
            return "an optimizer has parameters outside the models"
        if sum(one.numel() * one.element_size() for one in self._others()) > _MOST:
            return f"more than {_MOST >> 20} MiB of the models are not trained"
        return ""

    def listen(self) -> None:
        """Hear of each step of the optimizers."""
        self._hooks = [one.register_step_pre_hook(self._begun) for one in self._optimizers]

    def _begun(self, *_: Any) -> None:
        self._has_begun = True

    def begin_step(self) -> None:
        """Note what tells that something has changed."""
        self._has_begun = False
        self._mark = self._marked()
        self._had_gradients = any(one.grad is not None for one in self._trained)
        self._options = [copy.deepcopy(_options(group)) for group in self._groups()]
        self._training = [one.training for one in self._modules]
        self._passes = [of_torch.passes(one)[0] for one in self._models.values()]
        self._resting = self._resting or self._digest()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    def _marked(self) -> list[Any]:
        states = [state for one in self._optimizers for state in one.state.values()]
        values = [*self._trained, *(value for state in states for value in state.values())]
        return [
            [of_torch.place(v) if isinstance(v, torch.Tensor) else v for v in values],
            [one.requires_grad for one in self._trained],
            [repr(one.state_dict()) for one in self._schedules],
        ]

    def _digest(self) -> str:
        return " ".join(map(digest, self._others())) or "nothing"

    def changed(self) -> str:
        """What the step that is under way may have changed; empty where it is nothing."""
        if self._has_begun:
            return "an optimizer had begun its step"
        if self._had_gradients:
            return "gradients were kept over the boundary: clear them after the optimizer's step"
        parts = [m for one in self._models.values() for m in one.modules()]
        trained = [p for p in self._parameters() if p.requires_grad]
        if parts != self._modules or [*map(id, trained)] != [*map(id, self._trained)]:
            return "a model had other parts than at the start"
        if self._mark != self._marked():
            return "a parameter, an optimizer or a schedule had changed in the step"
        if self._resting != self._digest():
            return "buffers change while training, as the averages of a BatchNorm do"
        for (name, one), before in zip(self._models.items(), self._passes, strict=True):
            count, is_settled = of_torch.passes(one)
            if not is_settled:
                return f"{name} may still change its buckets, or has a communication hook"
            if count > before + 1:  # a first pass may lead to a change, and what if by `.data`?
                return f"{name} had run more than once in the step"
        return ""

    def put_back(self) -> None:
        """What many loops set in a step before they compute: rates, and train or eval."""
        for group, options in zip(self._groups(), self._options, strict=True):
            for name in _options(group):
                del group[name]
            group.update(options)
        for module, is_training in zip(self._modules, self._training, strict=True):
            module.training = is_training

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _params(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [p for one in optimizers for group in one.param_groups for p in group["params"]]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
