"""Loops as people write them, each a small job: python loops.py <dir> '{"loop": "gan", …}'

Writes the final weights to <dir>/weights.pt. `kill_at` maps places to signals, in attempt 1 only:
{"step 13": "TERM"} is the begin of a step, {"poll 13": …} just before a poll of it.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import forge

POINTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(7))
VALUES = POINTS.sum(1, keepdim=True).sin()
DATA = TensorDataset(POINTS, VALUES)


class Bench:
    """What the loops have in common: a model, its optimizer, and the signals to come."""

    def __init__(self, directory, spec):
        checkpoints = directory / "checkpoints"
        self.kill_at = {} if checkpoints.exists() else dict(spec.get("kill_at", {}))
        self.policy = {"checkpoint": {"dir": str(checkpoints)}}
        self.spec = spec
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def run(self, **more):
        return forge.Run(self.policy, model=self.model, optimizer=self.optimizer, **more)

    def reach(self, place):
        """The signal that was asked for at this place, if one was."""
        name = self.kill_at.pop(place, None)
        if name:
            os.kill(os.getpid(), signal.Signals["SIG" + name])

    def learn(self, run, x, y):
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        run.update(loss, self.optimizer)
        run.log(loss=loss)

    def evaluate(self, run, place):
        """Draws, as a generative model does, and polls."""
        self.model.eval()
        total = 0.0
        with torch.no_grad():
            for _ in range(3):
                total += self.model(torch.randn(4, 6)).sum().item()
                self.reach(f"poll {place}")
                run.poll()
        self.model.train()
        return total


def between(bench):
    """An evaluation between two phases, which share a loader."""
    loader = DataLoader(DATA, 5, shuffle=True)
    with bench.run() as run:
        for step, (x, y) in run.steps(8, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)
        bench.evaluate(run, "between")
        for step, (x, y) in run.steps(20, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)


class Records(Dataset):
    """Samples as dicts."""

    def __len__(self):
        return len(POINTS)

    def __getitem__(self, index):
        return {"x": POINTS[index], "more": {"y": VALUES[index], "name": f"number {index}"}}


def pops(bench):
    """Takes things out of its batch, which is a dict, before it evaluates."""
    with bench.run() as run:
        for step, batch in run.steps(20, DataLoader(Records(), 5, shuffle=True)):
            bench.reach(f"step {step}")
            y, _ = batch["more"].pop("y"), batch["more"].pop("name")
            bench.learn(run, batch.pop("x"), y)
            if step % 7 == 6:
                run.log(held_out=bench.evaluate(run, step))


def shares(bench):
    """One generator shuffles the data and draws the noise."""
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, 5, shuffle=True, generator=generator)
    with bench.run(generator=generator) as run:
        for step, (x, y) in run.steps(25, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x + 0.1 * torch.randn(x.shape, generator=generator), y)


def stateful(bench):
    """A StatefulDataLoader shuffles by a generator of its own; noise comes from the global one."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(4)
    workers = bench.spec.get("workers", 0)
    loader = StatefulDataLoader(DATA, 5, shuffle=True, generator=generator, num_workers=workers)
    with bench.run() as run:
        for step, (x, y) in run.steps(26, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x + 0.01 * torch.randn_like(x), y)


def unfreezes(bench):
    """Trains the head alone for eight steps; the script freezes the rest as it starts."""
    for parameter in bench.model[0].parameters():
        parameter.requires_grad_(False)
    with bench.run() as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            if step == 8:
                for parameter in bench.model[0].parameters():
                    parameter.requires_grad_(True)
            bench.learn(run, x, y)
            run.log(trained=sum(p.requires_grad for p in bench.model.parameters()))


def gan(bench):
    """Two updates in a step, polls between and after them, and gradients that spill over."""
    maker = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    judge = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.01)
    judge_optimizer = torch.optim.RMSprop(judge.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(maker_optimizer, 5, 0.9)
    objects = {"maker": maker, "judge": judge, "schedule": schedule}
    objects |= {"maker_optimizer": maker_optimizer, "judge_optimizer": judge_optimizer}

    def look(run, place):
        with torch.no_grad():
            value = maker(torch.randn(4, 3)).sum().item()
        bench.reach(f"poll {place}")
        run.poll()
        return value

    with forge.Run(bench.policy, **objects) as run:
        for step, (x, _) in run.steps(24, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            noise = torch.randn(len(x), 3)
            judge_loss = judge(maker(noise).detach()).mean() - judge(x).mean()
            judge_loss += judge(x).square().mean()
            judge_loss.backward()
            run.update(judge_loss, judge_optimizer, clip_norm=1.0)
            run.log(judge_loss=judge_loss, between=look(run, f"{step} between"))
            maker_loss = -judge(maker(noise)).mean()
            maker_loss.backward()
            run.update(maker_loss, maker_optimizer, schedule)
            judge_optimizer.zero_grad()
            run.log(maker_loss=maker_loss, after=look(run, f"{step} after"))
    bench.model = torch.nn.ModuleList([maker, judge])


class Fragile(Dataset):
    """Data that does something each time it is read."""

    def __init__(self, read):
        self.read = read

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        self.read()
        return DATA[index]


def raises(bench):
    """Raises in attempt 1, where the signal of `kill_at` has just come."""
    (where,) = bench.kill_at or [None]

    def reach(place):
        bench.reach(place)
        if place == where:
            raise RuntimeError("a helper has died")

    with bench.run() as run:
        data = Fragile(lambda: reach(f"data {run.step}"))
        for step, (x, y) in run.steps(20, DataLoader(data, 5, shuffle=True)):
            reach(f"begin {step}")
            bench.learn(run, x, y)
            reach(f"updated {step}")
            if step % 7 == 6:
                run.log(held_out=bench.evaluate(run, step))
            if step % 3 == 0:
                run.log(drawn=torch.randn(()))
            reach(f"end {step}")


class OwnOrder:
    """A sampler that shuffles by a generator of its own."""

    def __init__(self):
        self.random = random.Random(0)

    def __len__(self):
        return len(DATA)

    def __iter__(self):
        order = list(range(len(DATA)))
        self.random.shuffle(order)
        return iter(order)


class SavedOrder(OwnOrder):
    """The same, with its state known."""

    def state_dict(self):
        return {"random": self.random.getstate()}

    def load_state_dict(self, state):
        self.random.setstate(state["random"])


class OwnNoise(Dataset):
    """Data with noise from a generator of its own."""

    def __init__(self):
        self.random = numpy.random.default_rng(0)

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        return POINTS[index] + float(self.random.normal()), VALUES[index]


class GlobalNoise(OwnNoise):
    """The same, from torch's."""

    def __init__(self):
        pass

    def __getitem__(self, index):
        return POINTS[index] + torch.randn(()), VALUES[index]


def keeps_to_itself(bench):
    """A loader whose parts draw for themselves."""
    loaders = {
        "sampler with random.Random": lambda: DataLoader(DATA, 5, sampler=OwnOrder()),
        "sampler with state": lambda: DataLoader(DATA, 5, sampler=SavedOrder()),
        "dataset with numpy's": lambda: DataLoader(OwnNoise(), 5, shuffle=True),
        "dataset that is seeded": lambda: DataLoader(
            forge.data.seeded(GlobalNoise(), 3), 5, shuffle=True
        ),
    }
    with bench.run() as run:
        for step, (x, y) in run.steps(20, loaders[bench.spec["kind"]]()):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)


ALL = (between, pops, shares, stateful, unfreezes, gan, raises, keeps_to_itself)
LOOPS = {loop.__name__: loop for loop in ALL}


def main(directory, spec):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    bench = Bench(directory, spec)
    LOOPS[spec["loop"]](bench)
    torch.save(bench.model.state_dict(), directory / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
