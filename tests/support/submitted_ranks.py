"""A training of several tasks as the tests submit it; one of its ranks is struck, once."""

import os
import signal

import torch
from light import POLICY, begin, note
from submitted import digest, wait_here
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import forge

STEPS = 12
PLACE = 7


def train(folder, strike=""):
    """Rank 1 is struck in a step of the first start, by a signal or an error (or rank 0 is killed).

    With "waits" all of them wait there for a signal.
    """
    world = forge.distributed.init()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    is_first = begin(folder / str(world.rank))
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, 4))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    policy = POLICY | {"checkpoint": {"every_steps": 4}}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        note(folder / str(world.rank), "resumed", run.resumed_from)
        for step, (x,) in run.steps(STEPS, loader):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            is_there = is_first and step == PLACE
            if is_there and strike == "waits":
                wait_here(folder / str(world.rank), "boundary")
            elif is_there and strike == "kills 0":
                if world.rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif is_there and strike and world.rank == 1:
                if strike == "raises":
                    raise ValueError("no such luck")
                os.kill(os.getpid(), getattr(signal, strike))
    return world.rank, digest(model)
