"""What the tests submit. Each start notes itself; the first one waits where the test wants it."""

import ctypes
import hashlib
import os
import signal
import time

import torch
from light import HASTY, POLICY, begin, note, noted
from submitit.core.utils import DelayedSubmission
from torch.utils.data import DataLoader, TensorDataset

import forge
from forge.shutdown import stopping

STEPS = 12
PLACE = 5


def wait_here(folder, how):
    """Only a signal ends this: at the next boundary, or by force."""
    note(folder, "waits", os.getpid())
    if how == "in C":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # a mutex is not recursive, and no signal interrupts it
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    while how != "boundary" or not stopping.is_stopping():
        time.sleep(0.01 if how == "boundary" else 60)


def digest(model):
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def build():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(folder, policy=None, how="never", num_waiting=1):
    """A loop with noise; its first starts wait in a step, after its update."""
    begin(folder)
    num_starts = len(noted(folder, "starts"))
    model, optimizer = build()
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
    with forge.Run(policy or POLICY, model=model, optimizer=optimizer) as run:
        note(folder, "resumed", run.resumed_from)
        for step, (x,) in run.steps(STEPS, loader):
            waits = how != "never" and num_starts <= num_waiting and step >= PLACE
            loss = (model(x + torch.randn(4, 4) / 9) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            if waits:
                wait_here(folder, how)
    return digest(model)


def train_by_hand(folder):
    """A loop of the user's own: it never comes to a boundary."""
    begin(folder)
    model, optimizer = build()
    with forge.Run(HASTY, model=model, optimizer=optimizer):
        for _ in range(STEPS):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        wait_here(folder, "by hand")


class UnderSubmitit:
    """Training whose signal goes to submitit's own handler, which calls `checkpoint`."""

    def __call__(self, folder, place):
        """`place` is where the signal comes: held, 7 (after the first loop), or step."""
        is_first = begin(folder)
        to_submitit = signal.getsignal(signal.SIGUSR2)
        model, optimizer = build()
        policy = POLICY | {
            "checkpoint": {"dir": str(folder / "saves"), "every_steps": 4},
            "signal": {"name": "USR1", "actions": {"USR2": "ignore"}},
        }
        with forge.Run(policy, model=model, optimizer=optimizer) as run:
            note(folder, "resumed", run.resumed_from)
            signal.signal(signal.SIGUSR2, to_submitit)

            def reach(here):
                if is_first and here == place:
                    os.kill(os.getpid(), signal.SIGUSR2)

            @run.every(6)
            def evaluate(step):
                kept = model[0].weight.detach().clone()
                torch.nn.init.zeros_(model[0].weight)
                reach("held")
                model[0].weight.data.copy_(kept)

            for n in (7, STEPS):
                for step in run.steps(n):
                    loss = (model(torch.randn(4, 4)) - 1).square().mean()
                    loss.backward()
                    if step == 5:
                        reach("step")
                    run.update(loss, optimizer)
                reach(n)
        return digest(model)

    def checkpoint(self, *arguments):
        forge.Checkpointable(self).checkpoint(*arguments)
        return DelayedSubmission(self, *arguments)
