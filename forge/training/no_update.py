"""Tells a training that has updated nothing: its loop has run, and its parameters are as before.

A script that forgets `run.update` ends with exit code 0 and the weights that it began with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from forge.checkpoint.format import shards, tensor_encoding

_SAMPLE = 256
"""Elements of each parameter that are compared, roughly."""


class NoUpdate:
    """Compares the parameters of optimizers at the first loop and at the end.

    Calls are not enough: a CUDA graph that is replayed steps without any call of Python's.
    """

    def __init__(self) -> None:
        self._before: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.has_stepped = False
        """Whether an optimizer has stepped, or an update was decided about."""

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """The first loop begins."""
        if self._before is None:
            groups = [group for one in optimizers for group in one.param_groups]
            parameters = [p for group in groups for p in group["params"]]
            self._before = [(p, _sample(p).clone()) for p in parameters if _is_comparable(p)]

    def warning(self, num_steps: int) -> str:
        """What to log at the end of a training of so many steps; empty: something has changed."""
        if self.has_stepped or not (num_steps and self._before):
            return ""
        if not all(torch.equal(_sample(p), before) for p, before in self._before):
            return ""
        return (
            f"Nothing was updated in {num_steps} steps: no optimizer has stepped, and the"
            " parameters are the same as at the start. Write `loss.backward()` and"
            " `run.update(loss, optimizer)` in the loop. If the loop is an evaluation, leave the"
            " optimizer out of forge.Run(…)"
        )


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
