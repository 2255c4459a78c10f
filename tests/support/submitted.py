"""What the tests submit. Each start notes itself; the first one waits where the test wants it."""

import ctypes
import hashlib
import os
import time

import torch
from light import POLICY, begin, note
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.shutdown import stopping

STEPS = 12
PLACE = 5


def wait_here(folder, how):
    """Only a signal ends this: at the next boundary, or from outside."""
    note(folder, "waits", os.getpid())
    if how == "in C":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # a mutex is not recursive, and no signal interrupts it
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    while how != "boundary" or not stopping._state.handler.should_shutdown():
        time.sleep(0.01 if how == "boundary" else 60)


def digest(model):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def build():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(folder, policy=None, how="never", place="after", always=False):
    """A loop with noise; waits in a step, after or before its update."""
    is_first = begin(folder)
    model, optimizer = build()
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
    with forge.Run(policy or POLICY, model=model, optimizer=optimizer) as run:
        note(folder, "resumed", run.resumed_from)
        for step, (x,) in run.steps(STEPS, loader):
            waits = how != "never" and (is_first or always) and step >= PLACE
            loss = (model(x + torch.randn(4, 4) / 9) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if place == "before":
                time.sleep(0.025)  # from 20 ms on a step can be repeated with its random draws
                if waits:
                    wait_here(folder, how)
            run.update(loss, optimizer)
            if waits and place == "after":
                wait_here(folder, how)
    return digest(model)


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Halved(torch.optim.AdamW):
    """In the middle of one of its steps a signal arrives, and nothing may be saved for a while."""

    folder = None

    def step(self):
        if self.folder is not None:
            weights = self.param_groups[0]["params"][0]
            before = weights.detach().clone()
            with torch.no_grad():
                weights.zero_()
                note(self.folder, "waits", os.getpid())
                while not stopping._state.handler.should_shutdown():
                    time.sleep(0.01)
                time.sleep(2)  # longer than the patience with a loop that does not poll
                weights.copy_(before)
            self.folder = None
        super().step()


def train_by_hand(folder, policy=None, how="never", always=False):
    """A loop of the user's own: it never comes to a boundary."""
    is_first = begin(folder)
    model, optimizer = build()
    optimizer = Halved(model.parameters(), lr=1e-2)
    counter = Counter()
    data = torch.randn(40, 4)
    with forge.Run(policy or POLICY, model=model, optimizer=optimizer, counter=counter) as run:
        note(folder, "resumed", run.resumed_from)
        note(folder, "counts", counter.count)
        while counter.count < STEPS:
            x = data[counter.count : counter.count + 4]
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            waits = (is_first or always) and counter.count + 1 >= PLACE
            if waits and how == "in the update":
                optimizer.folder = folder
            optimizer.step()
            optimizer.zero_grad()
            counter.count += 1
            if waits and how != "never":
                wait_here(folder, how)
    return digest(model)
