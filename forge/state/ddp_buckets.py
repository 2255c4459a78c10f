"""Saves the order in which DistributedDataParallel sums gradients, which affects the last bits.

A process starts with one assignment of parameters to buckets, and DDP makes another after the first
backward pass, in the order in which gradients became ready. A resumed process would therefore sum
its first step differently from an uninterrupted run. So the order is saved, and replayed once
before the first step: each parameter gets a gradient of zeros in that order, and DDP rebuilds its
buckets.

All of it is collective: every rank has to do it at the same boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from forge.compat import of_torch
from forge.errors import ConfigError


def _wrapped(objects: Mapping[str, Any]) -> Iterator[tuple[str, DistributedDataParallel]]:
    for name, one in objects.items():
        if isinstance(one, torch.nn.Module):
            for path, module in one.named_modules(prefix=name):
                # A static graph counts its backward passes, and would count the replayed one.
                if isinstance(module, DistributedDataParallel) and not module.static_graph:
                    yield path, module


def check(objects: Mapping[str, Any], num_ranks: int) -> None:
    """Refuse modules that cannot resume with the same bits.

    Raises:
        ConfigError: Names them.
    """
    problems = [
        f"{name} contains a DistributedDataParallel with static_graph=True, and there are"
        f" {num_ranks} ranks: a resumed job would sum its first gradients in another order, so the"
        " last bits differ. Leave static_graph out (activation checkpointing with"
        " use_reentrant=False does not need it; for parameters without gradients use"
        " find_unused_parameters=True)."
        for name, one in objects.items()
        if isinstance(one, torch.nn.Module)
        and any(isinstance(m, DistributedDataParallel) and m.static_graph for m in one.modules())
    ]
    if problems:
        raise ConfigError(problems, "The call of forge.Run")


def capture(objects: Mapping[str, Any]) -> dict[str, list[int]]:
    """By the path of each DDP module, the numbers of its parameters in the order of its buckets.

    Without modules that still have their initial assignment.
    """
    orders = {path: of_torch.bucket_order(ddp) for path, ddp in _wrapped(objects)}
    return {path: order for path, order in orders.items() if order}


def restore(objects: Mapping[str, Any], saved: Mapping[str, list[int]]) -> None:
    """Restore the buckets of each DDP module.

    Call it before anything else is loaded: the user's hooks see gradients of zeros.

    If the number of parameters has changed, the order is not restored.
    """
    for path, ddp in _wrapped(objects):
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        order = saved.get(path, [])
        is_known = sorted(order) == list(range(len(parameters)))
        if is_known and order != of_torch.bucket_order(ddp):
            of_torch.rebuild_buckets(ddp, [parameters[number] for number in order])
            for parameter in parameters:
                parameter.grad = None
