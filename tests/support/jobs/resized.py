"""A training whose ranks note which samples they see; another start has another number of ranks.

`python resized.py <directory> <spec as JSON>`: `kind` of sampler, `loop`, and the step `at` which
rank 0 is signalled, once.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import forge

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = TensorDataset(torch.arange(96.0)[:, None])
if spec["kind"] == "global":
    sampler = forge.data.GlobalBatchSampler(data, 12, seed=3)
    loader = DataLoader(data, batch_sampler=sampler)
else:
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=12 // size, sampler=sampler)
torch.manual_seed(100 + rank)
mark, notes = directory / "signalled", directory / f"seen_{rank}.txt"


def train(step, x):
    with notes.open("a") as file:
        file.write(json.dumps([step, [int(value) for value in x[:, 0]]]) + "\n")
    if step == spec.get("at") and rank == 0 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGUSR1)
    loss = model(x).square().mean()
    loss.backward()
    run.update(loss, optimizer)
    run.log(loss=loss)


policy = {"checkpoint": {"dir": str(directory / "checkpoints")}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    if spec["loop"] == "steps":
        for step, (x,) in run.steps(40, loader):
            train(step, x)
    else:
        for epoch in run.epochs(5):
            sampler.set_epoch(epoch)
            for step, (x,) in run.batches(loader):
                train(step, x)
dist.destroy_process_group()
