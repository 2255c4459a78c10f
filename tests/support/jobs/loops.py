"""Loops as people write them: python loops.py <dir> '{"loop": "gan", …}'

Writes the final weights to <dir>/weights.pt. `kill_at` maps places to signals, in attempt 1 only:
{"step 13": "TERM"} is the start of a step.
"""

import itertools

import numpy as np
import torch
from bench import DATA, play, play_arguments
from torch.utils.data import DataLoader, Dataset

import forge


def between(bench):
    """An evaluation between two phases, which share a loader."""
    loader = DataLoader(DATA, 5, shuffle=True)
    with bench.run() as run:
        for step, (x, y) in run.steps(8, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)
        bench.reach("between")
        bench.evaluate()
        for step, (x, y) in run.steps(20, loader):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)


def stages(bench):
    """What stands between three loops changes the weights and the rate, and draws."""
    drawn = []
    with bench.run() as run:
        for end in (6, 12, 20):
            for step, (x, y) in run.steps(end, DataLoader(DATA, 5, shuffle=True)):
                bench.reach(f"step {step}")
                bench.learn(run, x, y)
                run.log(drawn=sum(drawn))
            bench.optimizer.param_groups[0]["lr"] *= 0.5
            with torch.no_grad():
                bench.model[0].bias.add_(torch.randn(16))
            drawn.append(torch.rand(()).item())


def stops_early(bench):
    """Six steps of twenty, since the loss is low enough."""
    with bench.run() as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)
            if step == 5:
                if bench.spec.get("saves"):
                    run.save()
                run.finish("the loss is low enough")
                bench.reach("asked")
        bench.reach("after")


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
    """Two updates in a step, and gradients that spill over."""
    maker = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    judge = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.01)
    judge_optimizer = torch.optim.RMSprop(judge.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(maker_optimizer, 5, 0.9)
    objects = {"maker": maker, "judge": judge, "schedule": schedule}
    objects |= {"maker_optimizer": maker_optimizer, "judge_optimizer": judge_optimizer}

    with forge.Run(bench.policy, **objects) as run:
        for step, (x, _) in run.steps(24, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            noise = torch.randn(len(x), 3)
            judge_loss = judge(maker(noise).detach()).mean() - judge(x).mean()
            judge_loss += judge(x).square().mean()
            judge_loss.backward()
            run.update(judge_loss, judge_optimizer, clip_norm=1.0)
            run.log(judge_loss=judge_loss)
            bench.reach(f"between {step}")
            maker_loss = -judge(maker(noise)).mean()
            maker_loss.backward()
            run.update(maker_loss, maker_optimizer, schedule)
            judge_optimizer.zero_grad()
            run.log(maker_loss=maker_loss)
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
                run.log(held_out=bench.evaluate())
            if step % 3 == 0:
                run.log(drawn=torch.randn(()))
            reach(f"end {step}")


class Sharpness(torch.optim.Optimizer):
    """SAM: climbs first, and steps another optimizer that has the same groups."""

    def __init__(self, parameters, lr, radius):
        super().__init__(parameters, {"lr": lr, "radius": radius})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["way"] = p.grad * group["radius"]
                p.add_(self.state[p]["way"])
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["way"])
        self.base_optimizer.step()


def sharpness(bench):
    """A schedule sets the rate of the outer optimizer, which is the inner one's, too."""
    outer = Sharpness(bench.model.parameters(), 0.05, 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(outer, 0.9)
    with bench.run(outer=outer, inner=outer.base_optimizer, schedule=schedule) as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            (bench.model(x) - y).square().mean().backward()
            outer.climb()
            loss = (bench.model(x) - y).square().mean()
            loss.backward()
            run.update(loss, outer, schedule=schedule)
            run.log(loss=loss, rate=outer.base_optimizer.param_groups[0]["lr"])


def lists(bench):
    """Optimizers in a list, which share their groups, and generators of numpy."""
    layers = [{"params": bench.model[0].parameters()}, {"params": bench.model[3].parameters()}]
    one = torch.optim.SGD(layers, lr=0.05, momentum=0.9)
    both = [one, torch.optim.Adam(one.param_groups, lr=0.05)]
    noise = {"new": np.random.default_rng(3), "old": np.random.RandomState(4)}
    schedule = torch.optim.lr_scheduler.ExponentialLR(one, 0.9)
    first = one.param_groups[0]
    with bench.run(optimizers=both, noise=noise, schedule=schedule) as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            x = x + noise["new"].standard_normal() * 0.1 + noise["old"].randn() * 0.1
            loss = (bench.model(x) - y).square().mean()
            loss.backward()
            run.update(loss, both, schedule=schedule)
            run.log(loss=loss, rate=both[1].param_groups[0]["lr"], named=first["lr"])


class Combined:
    """As Lightning's: `iter` begins again and returns the object itself."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        self.iterator = zip(*self.loaders, strict=False)
        return self

    def __next__(self):
        return next(self.iterator)


def combines(bench, batches, steps):
    with bench.run() as run:
        for step, ((x, y), (u, v)) in run.steps(steps, batches):
            bench.reach(f"step {step}")
            bench.learn(run, torch.cat([x, u]), torch.cat([y, v]))


def combined(bench):
    """An object that is its own iterator, and can begin again."""
    combines(bench, Combined(*(DataLoader(DATA, n, shuffle=True) for n in (5, 8))), 20)


def zipped(bench):
    """Of two loaders, the smaller of which is read from memory again and again."""
    again = itertools.cycle(DataLoader(DATA, 20, shuffle=True))
    combines(bench, zip(DataLoader(DATA, 4, shuffle=True), again, strict=False), 12)


def fails_if_large(step, x):
    """As a batch does that does not fit into the device's memory."""
    if step == 6 and len(x) > 5:
        raise RuntimeError("out of memory")


def begins_again(bench):
    """Begins the loop anew after an error, with batches of another size, which nobody saves."""
    size = 10
    with bench.run() as run:
        for _ in range(2):
            try:
                for step, (x, y) in run.steps(20, DataLoader(DATA, size, shuffle=True)):
                    bench.reach(f"step {step}")
                    fails_if_large(step, x)
                    bench.learn(run, x, y)
                break
            except RuntimeError:
                size = 5


def evaluation_fails(bench):
    """Catches the error of an evaluation, and goes on in another loop."""
    loader = DataLoader(DATA, 5, shuffle=True)
    with bench.run() as run:
        run.state["failures"] = 0

        @run.every(6)
        def evaluate(step):
            if run.state["failures"] == 0:
                raise RuntimeError("out of memory")

        while run.step < 20:
            try:
                for step, (x, y) in run.steps(20, loader):
                    bench.reach(f"step {step}")
                    bench.learn(run, x, y)
            except RuntimeError:
                run.state["failures"] += 1


def halves_a_batch(bench):
    """Catches the error inside the step, and does the batch in halves."""
    with bench.run() as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 10, shuffle=True)):
            bench.reach(f"step {step}")
            try:
                fails_if_large(step, x)
                bench.learn(run, x, y)
            except RuntimeError:
                bench.optimizer.zero_grad()
                losses = [(bench.model(a) - b).square().mean() / 2 for a, b in halves(x, y)]
                for loss in losses:
                    loss.backward()
                run.update(sum(losses), bench.optimizer)
                run.log(loss=sum(losses))


def halves(x, y):
    return zip(x.chunk(2), y.chunk(2), strict=True)


def keeps_its_batch_size(bench):
    """Begins the loop anew after an error, with a batch size that is saved."""
    with bench.run() as run:
        run.state.setdefault("batch_size", 10)
        while run.step < 20:
            loader = DataLoader(DATA, run.state["batch_size"], shuffle=True)
            try:
                for step, (x, y) in run.steps(20, loader):
                    bench.reach(f"step {step}")
                    fails_if_large(step, x)
                    bench.learn(run, x, y)
            except RuntimeError:
                bench.optimizer.zero_grad()
                run.state["batch_size"] //= 2


def folds(bench):
    """Works on the weights after the loop, which ends by its `n`, or by a break."""
    with bench.run() as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)
            if step == bench.spec.get("breaks_at"):
                break
        bench.fold(run)


def two_phases(bench):
    """The first ends by a break."""
    with bench.run() as run:
        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)
            if step == 5:
                break
        for step, (x, y) in run.steps(20, DataLoader(DATA, 8, shuffle=True)):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)


LOOPS = (
    begins_again,
    between,
    combined,
    evaluation_fails,
    folds,
    gan,
    halves_a_batch,
    keeps_its_batch_size,
    lists,
    raises,
    sharpness,
    stages,
    stops_early,
    two_phases,
    unfreezes,
    zipped,
)


def main(directory, spec):
    play(LOOPS, directory, spec)


if __name__ == "__main__":
    play_arguments(main)
