"""Loops as people write them: python loops.py <dir> '{"loop": "gan", …}'

Writes the final weights to <dir>/weights.pt. `kill_at` maps places to signals, in attempt 1 only:
{"step 13": "TERM"} is the start of a step.
"""

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


LOOPS = (between, stages, stops_early, unfreezes, gan, raises)


def main(directory, spec):
    play(LOOPS, directory, spec)


if __name__ == "__main__":
    play_arguments(main)
