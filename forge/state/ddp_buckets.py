"""The order in which DistributedDataParallel sums gradients, which decides the last bits of a sum.

Each process begins with one assignment of parameters to buckets, and makes another one after its
first backward, by the order in which the gradients came. A resumed process would sum its first step
as no undisturbed run ever sums that step. So the order is saved, and gone through once before the
first step: each parameter gets a gradient of zeros in that order, and DDP makes its buckets anew.

All of it is collective: every rank has to do it at the same boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from forge.compat import of_torch


def _wrapped(objects: Mapping[str, Any]) -> Iterator[tuple[str, DistributedDataParallel]]:
    for name, one in objects.items():
        if isinstance(one, torch.nn.Module):
            for path, module in one.named_modules(prefix=name):
                # A static graph counts its backward passes, and would take ours for one of them.
                if isinstance(module, DistributedDataParallel) and not module.static_graph:
                    yield path, module


def problems(objects: Mapping[str, Any], num_ranks: int) -> list[str]:
    """What cannot be resumed with the same bits: sums of two have no order, those of more do."""
    if num_ranks <= 2:
        return []
    return [
        f"{name} holds a DistributedDataParallel with static_graph=True, and there are {num_ranks}"
        " ranks: a resumed job would sum its first gradients in another order, so that the last"
        " bits differ. Leave static_graph out (for activation checkpointing use_reentrant=False"
        " needs none; for parameters without gradients there is find_unused_parameters=True)."
        for name, one in objects.items()
        if isinstance(one, torch.nn.Module) and any(map(_is_static, one.modules()))
    ]


def _is_static(module: torch.nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) and bool(module.static_graph)


def capture(objects: Mapping[str, Any]) -> dict[str, list[int]]:
    """By the path of each DDP module, the numbers of its parameters in the order of its buckets.

    Without those that have the first assignment still.
    """
    orders = {path: of_torch.bucket_order(ddp) for path, ddp in _wrapped(objects)}
    return {path: order for path, order in orders.items() if order}


def restore(objects: Mapping[str, Any], saved: Mapping[str, list[int]]) -> None:
    """Let each DDP module have the buckets that it had.

    To be called before anything else is loaded: hooks of the user's see gradients of zeros.

    Where the number of parameters is another now, the order is left as it is.
    """
    for path, ddp in _wrapped(objects):
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        order = saved.get(path, [])
        is_known = sorted(order) == list(range(len(parameters)))
        if is_known and order != of_torch.bucket_order(ddp):
            of_torch.rebuild_buckets(ddp, [parameters[number] for number in order])
            for parameter in parameters:
                parameter.grad = None
