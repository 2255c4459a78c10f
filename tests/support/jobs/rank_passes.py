"""Passes of several ranks over loaders that can differ in length.

`python rank_passes.py <directory> <spec as JSON>`, as `ranks.py`. The spec has the number of
batches of each rank's loader (`lengths`), and whether the loaders are streams without a length;
`leaves` has the steps in which a rank leaves its loop, by a `break` or an error that it catches.
"""

import contextlib
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import forge
from forge.training.loop import loop_lengths

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
policy = {"checkpoint": {"dir": str(directory / "checkpoints")}, **spec.get("policy", {})}
loop_lengths.LEFT_S = spec.get("left_s", loop_lengths.LEFT_S)


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


class Departure(Exception):
    """Leaves a loop."""


def has_left(step):
    """Whether this rank leaves its loop after this step; raises if it does so by an error."""
    if [step, rank] not in spec.get("leaves", []):
        return False
    if spec.get("is_error"):
        raise Departure
    return True


def wait_for_all(name):
    """Wait until all ranks are here."""
    (directory / f"{name}_{rank}").touch()
    while not all((directory / f"{name}_{one}").exists() for one in range(size)):
        time.sleep(0.002)


def loop(n):
    if spec.get("pushed"):
        done = run.begin().step
        while done < n and not has_left(done - 1):
            train(done, loader[done])
            done += 1
            run.boundary(done)
        run.end_loop()
    elif "steps" in spec:
        for step, batch in run.steps(n, loader):
            train(step, batch)
            if has_left(step):
                break
    else:
        for _epoch in run.epochs(2 + (rank in spec.get("longer", []))):
            for step, batch in run.batches(loader):
                train(step, batch)
                if has_left(step):
                    break
            else:
                mean = torch.ones(1)
                dist.all_reduce(mean)
                assert mean == size, "a step of another rank has answered"


with forge.Run(policy, model=model, optimizer=optimizer) as run:
    with contextlib.suppress(Departure):
        loop(spec.get("steps"))
    match spec.get("then"):
        case "save":
            run.save()
        case "loop":
            loop(spec["steps"] * 2)
        case "meet":
            wait_for_all("left")
    steps = run.step
torch.save({**model.state_dict(), "steps": torch.tensor(steps)}, directory / f"weights_{rank}.pt")
dist.destroy_process_group()
