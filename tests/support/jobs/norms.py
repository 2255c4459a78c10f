"""What two ranks say of gradients that are sharded over them, in one case after the other.

`python norms.py <directory> <spec as JSON>`, with RANK, WORLD_SIZE and MASTER_ADDR in the
environment; `told_<rank>.json` has, by case, the problem, the norm, and the norm after clipping.
"""

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from forge.config.schema import NanConfig
from forge.filesystem.files import write_atomically
from forge.state.registry import StateRegistry
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.norms import whole
from forge.training.nan.update import Updater

torch.set_num_threads(1)
directory, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (size,))
model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
fully_shard(model, mesh=mesh)
plain = nn.Parameter(torch.zeros(4))  # the same on all ranks
optimizer = torch.optim.SGD([*model.parameters(), plain], lr=1.0)
policy = NanPolicy(NanConfig())
live = StateRegistry({"model": model, "optimizer": optimizer})
names = {id(p): name for name, p in live.parameters()}


def with_gradients():
    """Of each parameter but the frozen ones, and of one whose shard is empty on a rank."""
    optimizer.zero_grad()
    model(torch.arange(10.0).reshape(2, 5)).sum().backward()
    plain.grad = torch.ones(4)
    return [p for p in [*model.parameters(), plain] if p.grad is not None]


def norm_of(parameters):
    """By the whole gradients, in double precision."""
    wholes = [whole(p.grad).double() for p in parameters]
    return math.sqrt(sum(float(one.square().sum()) for one in wholes))


def planted(value, where):
    if rank == where:
        model[0].weight.grad.to_local()[0, 0] = value


told, nan = {}, math.nan
for case, value, where, loss in [
    ("good", 1.0, 0, 1.0),
    ("NaN in a shard", nan, 1, 1.0),
    ("overflow in a shard", 1e30, 1, 1.0),
    ("bad loss", 1.0, 0, nan if rank == 0 else 1.0),
    ("bad loss and NaN in another's shard", nan, 1, nan if rank == 0 else 1.0),
    ("overflow and a bad loss", 1e30, 1, nan if rank == 0 else 1.0),
]:
    parameters = with_gradients()
    planted(value, where)
    before = norm_of(parameters)
    checked = policy.check(loss, parameters, names, clip_norm=0.5)
    told[case] = [checked.problem, checked.is_loss_bad, float(checked.norm), before]
    told[f"{case}, clipped"] = norm_of(parameters)

with_gradients()
before = [whole(p.detach()).clone() for p in [*model.parameters(), plain]]
updater = Updater(live, policy, is_enabled=True)
told["updated"] = updater.update(1.0, optimizer, None, None, 0.5)
after = [whole(p.detach()) for p in [*model.parameters(), plain]]
told["moved by"] = math.sqrt(
    sum(float((a - b).double().square().sum()) for a, b in zip(before, after, strict=True))
)
write_atomically(directory / f"told_{rank}.json", json.dumps(told))
dist.destroy_process_group()
