"""Loops whose data is drawn by generators of many owners: python generators.py <dir> JSON

Writes the final weights to <dir>/weights.pt. `kill_at` maps places to signals, in attempt 1 only:
{"step 13": "TERM"} is the start of a step.
"""

import random

import numpy
import torch
from bench import DATA, POINTS, VALUES, play, play_arguments
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

import forge


def shares(bench):
    """One generator shuffles the data and draws the noise."""
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, 5, shuffle=True, generator=generator)
    with bench.run(generator=generator) as run:
        for step, (x, y) in run.steps(25, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x + 0.1 * torch.randn(x.shape, generator=generator), y)


class EverySecond(BatchSampler):
    """Half of the batches of another batch sampler, as Accelerate's BatchSamplerShard yields."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __len__(self):
        return len(self.batch_sampler) // 2

    def __iter__(self):
        return (one for number, one in enumerate(self.batch_sampler) if number % 2)


def nested(bench):
    """The generator belongs to a sampler inside two batch samplers."""
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(4))
    loader = DataLoader(DATA, batch_sampler=EverySecond(BatchSampler(sampler, 5, drop_last=False)))
    with bench.run() as run:
        for step, (x, y) in run.steps(26, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)


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

    exact = True

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


class Transformed(GlobalNoise):
    """The same, by a transform that keeps a generator."""

    def __init__(self):
        self.transforms = [Jitter()]

    def __getitem__(self, index):
        return self.transforms[0](POINTS[index]), VALUES[index]


class Jitter:
    def __init__(self):
        self.random = numpy.random.default_rng(0)

    def __call__(self, x):
        return x + float(self.random.normal())


class OwnMix:
    """Mixes a batch's samples, by a generator of its own."""

    def __init__(self):
        self.random = numpy.random.default_rng(0)

    def __call__(self, batch):
        x, y = default_collate(batch)
        share = self.random.random()
        return share * x + (1 - share) * x.roll(1, 0), y


def mix(batch):
    """The same, by the three global ones."""
    x, y = default_collate(batch)
    share = (torch.rand(()) + random.random() + numpy.random.rand()) / 3
    return (share * x + (1 - share) * x.roll(1, 0)).float(), y


def mixes(bench):
    """Workers draw for each sample, and for each batch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    kind = bench.spec["kind"]
    make = StatefulDataLoader if kind == "stateful" else DataLoader
    dataset = {"own": OwnNoise, "transformed": Transformed}.get(kind, GlobalNoise)()
    loader = make(
        forge.data.seeded(dataset, 3),
        5,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=kind == "persistent",
        collate_fn=OwnMix() if kind == "own" else mix,
    )
    with bench.run() as run:
        for step, (x, y) in run.steps(20, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x.float(), y.float())


def keeps_to_itself(bench):
    """A loader whose parts draw for themselves."""
    loaders = {
        "sampler with random.Random": lambda: DataLoader(DATA, 5, sampler=OwnOrder()),
        "sampler with state": lambda: DataLoader(DATA, 5, sampler=SavedOrder()),
        "dataset with numpy's": lambda: DataLoader(OwnNoise(), 5, shuffle=True),
        "seeded dataset with numpy's": lambda: DataLoader(forge.data.seeded(OwnNoise(), 3), 5),
        "collate_fn with numpy's": lambda: DataLoader(DATA, 5, collate_fn=OwnMix()),
        "dataset that is seeded": lambda: DataLoader(
            forge.data.seeded(GlobalNoise(), 3), 5, shuffle=True
        ),
    }
    with bench.run() as run:
        for step, (x, y) in run.steps(20, loaders[bench.spec["kind"]]()):
            bench.reach(f"step {step}")
            bench.learn(run, x.float(), y)


LOOPS = (shares, nested, stateful, mixes, keeps_to_itself)


def main(directory, spec):
    play(LOOPS, directory, spec)


if __name__ == "__main__":
    play_arguments(main)
