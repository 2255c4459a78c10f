"""Training in epochs: python epochs.py <dir> '{"loop": "plateau", "kill_at": {"after 1": "KILL"}}'

Places are `before E`, `step N`, `ran N` (after its update), `after E` and `late E`.
"""

import copy
import math
import random

import torch
from bench import DATA, play, play_arguments
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from forge.data import resumable

EPOCHS = 4


def loader(**options):
    return DataLoader(DATA, batch_size=8, shuffle=True, **options)


def trained(bench, run, batches):
    """One pass."""
    for step, (x, y) in run.batches(batches):
        bench.reach(f"step {step}")
        bench.learn(run, x, y)
        bench.reach(f"ran {step}")


def plain(bench):
    """Nothing before the pass, nothing after it."""
    batches = loader()
    with bench.run() as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            trained(bench, run, batches)
            bench.reach(f"after {epoch}")


def plateau(bench):
    """Evaluates, steps a schedule, and remembers the best, after each pass."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(bench.optimizer, patience=0)
    batches = loader(generator=torch.Generator().manual_seed(3))
    with bench.run(schedule=schedule) as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            trained(bench, run, batches)
            bench.reach(f"after {epoch}")
            value = bench.evaluate()
            schedule.step(value)
            run.state["best"] = min(run.state.get("best", math.inf), value)
            run.log(value=value, rate=bench.optimizer.param_groups[0]["lr"])
            bench.reach(f"late {epoch}")


def acts_before(bench):
    """Steps a schedule and draws before the pass, from a new loader each time."""
    random.seed(5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(bench.optimizer, 0.7)
    with bench.run(schedule=schedule) as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            if epoch:
                schedule.step()
            with torch.no_grad():  # a reset of some kind
                bench.model[0].bias.add_(torch.randn(16) * 0.1 + random.random() * 0.1)
            run.state["passes"] = run.state.get("passes", 0) + 1
            bench.reach(f"begun {epoch}")
            trained(bench, run, loader())
            bench.reach(f"after {epoch}")
            run.log(passes=run.state["passes"])


def accumulates(bench):
    """Gradients that are open at the end of a pass go on in the next one."""
    batches = loader()
    with bench.run() as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            for step, (x, y) in run.batches(batches):
                bench.reach(f"step {step}")
                loss = (bench.model(x) - y).square().mean() / 4
                loss.backward()
                if step % 4 == 3:
                    run.update(loss, bench.optimizer)
                bench.reach(f"ran {step}")
            bench.reach(f"after {epoch}")


def breaks(bench):
    """Leaves a pass early, and the training, too."""
    batches = loader()
    with bench.run() as run:
        run.every(epochs=2)(lambda step: run.log(held_out=bench.evaluate()))
        for epoch in run.epochs(100):
            bench.reach(f"before {epoch}")
            for step, (x, y) in run.batches(batches):
                bench.reach(f"step {step}")
                bench.learn(run, x, y)
                if run.batch == 3 + epoch % 2:
                    break
            bench.reach(f"after {epoch}")
            run.log(value=bench.evaluate())
            if epoch == EPOCHS - 1:
                break


def folds(bench):
    """Works on the weights after the last epoch, which ends by its number, or by a break."""
    batches = loader()
    with bench.run() as run:
        for epoch in run.epochs(EPOCHS):
            trained(bench, run, batches)
            run.state["value"] = bench.evaluate()
            if epoch == bench.spec.get("breaks_at"):
                break
        bench.fold(run)


def finishes(bench):
    """Early stopping after a pass; what is due at the end runs."""
    batches = loader()
    with bench.run() as run:
        run.every(5, epochs=1, at_end=True)(lambda step: run.log(held_out=bench.evaluate()))
        for epoch in run.epochs(100):
            bench.reach(f"before {epoch}")
            trained(bench, run, batches)
            bench.reach(f"after {epoch}")
            run.state["bad"] = run.state.get("bad", 0) + 1
            if run.state["bad"] == EPOCHS:
                run.finish("no better")


def reweighs(bench):
    """Draws what the last pass found hard more often; the sampler is built before the pass."""
    data = TensorDataset(*DATA.tensors, torch.arange(len(DATA)))
    with bench.run() as run:
        run.state.setdefault("losses", torch.ones(len(data)))
        run.state.setdefault("noise", torch.Generator().manual_seed(3))
        run.state.setdefault("scale", 1.0)
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            scale = run.state["scale"] + torch.rand((), generator=run.state["noise"])
            sampler = WeightedRandomSampler(run.state["losses"], len(data))
            for step, (x, y, chosen) in run.batches(DataLoader(data, 8, sampler=sampler)):
                bench.reach(f"step {step}")
                losses = (bench.model(x * scale) - y).square().flatten()
                losses.mean().backward()
                run.update(losses.mean(), bench.optimizer)
                run.state["losses"][chosen] = losses.detach() * 50
                run.state["scale"] *= 1.01
                run.log(loss=losses.mean(), scale=scale, chosen=chosen.sum())
                bench.reach(f"ran {step}")
            bench.reach(f"after {epoch}")
            run.log(scale_after=scale)


def swaps(bench):
    """Evaluates other weights after the pass, polls, and puts the old ones back."""
    batches = loader()
    with bench.run() as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            trained(bench, run, batches)
            kept = copy.deepcopy(bench.model.state_dict())
            for p in bench.model.parameters():
                p.data.mul_(0.5)
            bench.reach(f"after {epoch}")
            run.check_stop()
            run.log(value=bench.evaluate())
            bench.model.load_state_dict(kept)
            bench.reach(f"late {epoch}")


def rolls_back(bench):
    """A NaN in the third pass, once; `policy` says how far back that leads."""
    batches, once = loader(), bench.directory / "once"
    with bench.run() as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            for step, (x, y) in run.batches(batches):
                bench.reach(f"step {step}")
                if step == 14 and not once.exists():
                    once.touch()
                    x = x * math.nan
                bench.learn(run, x, y)
            bench.reach(f"after {epoch}")
            run.log(value=bench.evaluate())


def endless(loader):
    """The batches of all passes, one pass after the other."""
    while True:
        yield from loader


def second(bench):
    """A second loader in each step, and one that is read now and then."""
    batches = loader(generator=torch.Generator().manual_seed(4))
    other = resumable(DataLoader(DATA, batch_size=5, shuffle=True))
    rare = resumable(DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA)))
    with bench.run(other=other, rare=rare) as run:
        others, rares = endless(other), endless(rare)
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            for step, (x, y) in run.batches(batches):
                bench.reach(f"step {step}")
                if run.batch == 2:
                    run.log(rare=next(rares)[0].sum())
                u, v = next(others)
                bench.learn(run, torch.cat([x, u]), torch.cat([y, v]))
                bench.reach(f"ran {step}")
            bench.reach(f"after {epoch}")


class Bar:
    """A progress bar, which holds what it shows."""

    def __init__(self, shown):
        self.shown = shown

    def __iter__(self):
        yield from self.shown


def bar(bench):
    """Leaves a pass by a break, and a name still stands for the iterator."""
    batches = loader()
    with bench.run() as run:
        run.every(4, epochs=1)(lambda step: run.log(held_out=bench.evaluate()))
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            shown = Bar(run.batches(batches))
            for step, (x, y) in shown:
                bench.reach(f"step {step}")
                bench.learn(run, x, y)
                if run.batch == 3:
                    break
            bench.reach(f"after {epoch}")
            run.log(value=bench.evaluate())
            bench.reach(f"late {epoch}")


class Stream:
    """Six batches a pass, and no pass has those of another."""

    exact = True

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while True:
            self.given += 1
            chosen = torch.Generator().manual_seed(self.given)
            yield DATA[torch.randint(48, (8,), generator=chosen)]
            if self.given % 6 == 0:
                return

    def state_dict(self):
        return vars(self)  # the very one that goes on changing

    def load_state_dict(self, state):
        self.given = state["given"]


def streams(bench):
    """Loaders with a state that goes on from pass to pass."""
    batches, other = Stream(), resumable(Stream())
    with bench.run(other=other) as run:
        others = endless(other)
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            for step, (x, y) in run.batches(batches):
                bench.reach(f"step {step}")
                u, v = next(others)
                bench.learn(run, torch.cat([x, u]), torch.cat([y, v]))
                bench.reach(f"ran {step}")
                run.log(batch=run.batch)
            bench.reach(f"after {epoch}")
            run.log(batches=run.batch)
            bench.reach(f"late {epoch}")


def loaders_of_epochs(bench):
    """A new loader for each pass, with a generator of its own."""
    with bench.run() as run:
        for epoch in run.epochs(EPOCHS):
            bench.reach(f"before {epoch}")
            run.log(before=run.batch)
            trained(bench, run, loader(generator=torch.Generator().manual_seed(3)))
            bench.reach(f"after {epoch}")
            if epoch == 1:
                run.save()  # between two epochs
            bench.reach(f"late {epoch}")


def several(bench):
    """Two loaders in one flat loop."""
    other = DataLoader(DATA, batch_size=5, shuffle=True)
    with bench.run() as run:
        for step, (x, y), (u, v) in run.steps(24, loader(), other):
            bench.reach(f"step {step}")
            bench.learn(run, torch.cat([x, u]), torch.cat([y, v]))
            bench.reach(f"ran {step}")


LOOPS = [
    bar,
    loaders_of_epochs,
    rolls_back,
    second,
    streams,
    several,
    plain,
    plateau,
    acts_before,
    accumulates,
    breaks,
    finishes,
    folds,
    reweighs,
    swaps,
]


def main(directory, spec):
    play(LOOPS, directory, spec)


if __name__ == "__main__":
    play_arguments(main)
