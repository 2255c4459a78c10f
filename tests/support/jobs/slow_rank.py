"""A training on several ranks, one of which takes its time, until a health check ends it.

`python slow_rank.py <directory> <spec as JSON>`; the spec says which rank is slow, and in what.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import forge

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
torch.manual_seed(7)


def slow_in(what):
    """Where the spec says so."""
    if rank == spec["slow"] and what == spec["how"]:
        time.sleep(0.03)


class Net(torch.nn.Module):
    """One layer; its gradient is late where the spec says so."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        slow_in("forward")
        out = self.layer(x)
        out.register_hook(lambda grad: slow_in("backward"))
        return out


model = DistributedDataParallel(Net())
model._set_ddp_runtime_logging_sample_rate(1)  # else a test would take hundreds of steps
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
policy = {"checkpoint": {"dir": str(directory / "checkpoints")}, **spec["policy"]}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for _ in run.steps(10**6):
        slow_in("data")
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        run.update(loss, optimizer)
