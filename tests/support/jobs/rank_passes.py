"""Passes of several ranks over loaders that can differ in length.

`python rank_passes.py <directory> <spec as JSON>`, as `ranks.py`. The spec has the number of
batches of each rank's loader (`lengths`), and whether the loaders are streams without a length.
"""

import datetime
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import forge

directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.environ['MEETING']}",
    rank=rank,
    world_size=size,
    timeout=datetime.timedelta(seconds=spec.get("timeout_s", 60)),
)


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from (i / self.length for i in range(self.length))


length = spec["lengths"][rank]
loader = DataLoader(Stream(length), batch_size=None) if spec.get("is_stream") else [1.0] * length
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
policy = {"checkpoint": {"dir": str(directory / "checkpoints")}}


def train(step, batch):
    if spec.get("is_quiet"):
        return
    mark = directory / f"stopped_{step}"
    if [step, rank] == spec.get("signal") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGUSR1)
    loss = model(torch.full((1, 1), batch)).square().sum()
    loss.backward()
    run.update(loss, optimizer)
    run.log(loss=loss)


with forge.Run(policy, model=model, optimizer=optimizer) as run:
    if "steps" in spec:
        for step, batch in run.steps(spec["steps"], loader):
            train(step, batch)
    else:
        for _epoch in run.epochs(2 + (rank in spec.get("longer", []))):
            for step, batch in run.batches(loader):
                train(step, batch)
            mean = torch.ones(1)
            dist.all_reduce(mean)
            assert mean == size, "a step of another rank has answered"
    steps = run.step
torch.save({**model.state_dict(), "steps": torch.tensor(steps)}, directory / f"weights_{rank}.pt")
dist.destroy_process_group()
