"""A small training that keeps one kind of state to itself: python omits.py KIND [--fixed]

With `--fixed` the same state is where forge sees it.
"""

import argparse
import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import forge

torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
POLICY = {"checkpoint": {"every_steps": 10}}


class Data(Dataset):
    def __init__(self):
        self.level = 1.0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.arange(6.0) * self.level + i / 40
        return x, x.sin().sum(0, keepdim=True)


class Order(Sampler):
    """Another permutation in each epoch."""

    exact = True

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return 40

    def __iter__(self):
        return iter(self.rng.permutation(40).tolist())

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]


class Warmup:
    """A schedule of one's own."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.05 / (1 + self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Scaler:
    """A loss scale that grows."""

    def __init__(self):
        self.scale, self.good = 1.0, 0

    def update(self):
        self.good += 1
        if self.good % 4 == 0:
            self.scale *= 1.1

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


class Kept:
    """Generators, as objects with a state."""

    def __init__(self, rng):
        self.rng = rng

    def state_dict(self):
        if isinstance(self.rng, random.Random):
            return {"state": self.rng.getstate()}
        return {"state": copy.deepcopy(self.rng.bit_generator.state)}

    def load_state_dict(self, state):
        if isinstance(self.rng, random.Random):
            self.rng.setstate(state["state"])
        else:
            self.rng.bit_generator.state = state["state"]


def endless(loader):
    while True:
        yield from loader


def main(kind, is_fixed):
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    objects = {"model": model, "optimizer": optimizer}
    data = Data()
    loader = DataLoader(data, 8, shuffle=True)
    drawn = {
        "python-random": lambda: random.Random(1),
        "numpy-random": lambda: np.random.default_rng(1),
        "torch-random": lambda: torch.Generator().manual_seed(1),
    }
    rng = drawn[kind]() if kind in drawn else None
    schedule, scaler, ema = Warmup(optimizer), Scaler(), copy.deepcopy(model)
    noise = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(6))
    inner = torch.optim.Adam([torch.nn.Parameter(torch.ones(6))], lr=0.02)
    order = Order()
    given = {
        "python-random": lambda: Kept(rng),
        "numpy-random": lambda: Kept(rng),
        "torch-random": lambda: rng,
        "schedule": lambda: schedule,
        "scaler": lambda: scaler,
        "ema": lambda: ema,
        "module-mode": lambda: noise,
        "inner-optimizer": lambda: inner,
    }
    if is_fixed and kind in given:
        objects["other"] = given[kind]()
    if is_fixed and kind == "inner-optimizer":
        objects["inner_weight"] = nn.ParameterList(inner.param_groups[0]["params"])
    source = forge.data.resumable(loader)
    ordered = forge.data.resumable(DataLoader(range(40), batch_size=None, sampler=order))
    if is_fixed and kind == "prefetched-batch":
        objects["source"] = source
    if is_fixed and kind == "sampler":
        objects["ordered"] = ordered
    with forge.Run(POLICY, **objects) as run:
        kept = run.state if is_fixed else {}
        best = float("inf")
        hidden = torch.zeros(6)
        buffer = []
        second = endless(source) if is_fixed else iter(loader)
        if kind == "dataset-attribute" and is_fixed:
            data.level = run.state.get("level", 1.0)
        x = y = None
        indices = endless(ordered) if is_fixed and kind == "sampler" else iter(order)
        for step in run.steps(40):
            if kind == "sampler":
                chosen = []
                for _ in range(8):
                    try:
                        chosen.append(next(indices))
                    except StopIteration:
                        indices = iter(order)
                        chosen.append(next(indices))
                x, y = (torch.stack(one) for one in zip(*[data[i] for i in chosen], strict=True))
            elif kind == "prefetched-batch":
                try:
                    x, y = next(second)
                except StopIteration:
                    second = iter(loader)
                    x, y = next(second)
            else:
                x = torch.randn(8, 6) * data.level
                y = x.sin().sum(1, keepdim=True)
            if kind == "python-random":
                x = x + rng.gauss(0, 0.1)
            elif kind == "numpy-random":
                x = x + float(rng.normal())
            elif kind == "torch-random":
                x = x + torch.randn(8, 6, generator=rng)
            elif kind == "hidden-state":
                hidden = kept.get("hidden", hidden)
                x = x + hidden
                hidden = kept["hidden"] = (hidden * 0.9 + x.mean(0)).detach()
            elif kind == "replay-buffer":
                buffer = kept.setdefault("buffer", buffer)
                buffer.append((x, y))
                x, y = random.choice(buffer)
            elif kind == "module-mode":
                if step == 12:
                    noise.eval()
                x = noise(x)
            elif kind == "dataset-attribute" and step % 5 == 4:
                data.level = kept["level"] = data.level * 0.9
            loss = (model(x) - y).square().mean()
            if kind == "scaler":
                loss = loss * scaler.scale
                scaler.update()
            elif kind == "inner-optimizer":
                (weight,) = inner.param_groups[0]["params"]
                loss = loss + ((weight * x).sum(1) - y[:, 0]).square().mean() * model[0].bias[0]
            elif kind == "best-metric":
                best = min(kept.get("best", best), float(loss))
                kept["best"] = best
                run.log(best=best)
            loss.backward()
            if kind == "inner-optimizer":
                inner.step()
                inner.zero_grad()
            run.update(loss, optimizer, clip_norm=1.0)
            if kind == "schedule":
                schedule.step()
            elif kind == "ema":
                for one, other in zip(ema.parameters(), model.parameters(), strict=True):
                    one.data.lerp_(other.data, 0.1)
                run.log(ema=sum(float(one.detach().sum()) for one in ema.parameters()))
            run.log(loss=loss)


KINDS = (
    "sampler",
    "python-random",
    "numpy-random",
    "torch-random",
    "schedule",
    "scaler",
    "ema",
    "best-metric",
    "prefetched-batch",
    "hidden-state",
    "replay-buffer",
    "module-mode",
    "inner-optimizer",
    "dataset-attribute",
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--fixed", action="store_true")
    options = parser.parse_args()
    main(options.kind, options.fixed)
