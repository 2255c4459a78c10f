"""Loops with modules and batches of unusual state: python modules.py <dir> '{"loop": …}'

Writes the final weights to <dir>/weights.pt. `kill_at` maps places to signals, in attempt 1 only:
{"step 13": "TERM"} is the begin of a step, {"poll 13": …} just before a poll of it.
"""

from collections import namedtuple

import torch
from bench import play, play_arguments


class Counts(torch.nn.Module):
    """Counts how often it is evaluated, or trained, and computes with that."""

    def __init__(self, inner, kind, when):
        super().__init__()
        self.inner, self.kind, self.when = inner, kind, when
        if kind == "buffer":
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = {"tensor": torch.zeros(1), "list": [], "number": 0}[kind]

    def forward(self, x):
        if self.training == (self.when == "training"):
            self.count()
        count = len(self.calls) if self.kind == "list" else self.calls
        return self.inner(x) * (1 + 0.01 * count)

    def count(self):
        if self.kind == "list":
            self.calls.append(1)
        elif self.kind == "tensor":
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1

    def get_extra_state(self):
        return {"calls": None if self.kind == "buffer" else self.calls}

    def set_extra_state(self, state):
        if self.kind != "buffer":
            self.calls = state["calls"]


class CountsInABuffer(Counts):
    """The same, with nothing but buffers to save."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


def counts(bench):
    """Evaluates every third step."""
    kind = bench.spec["kind"]
    make = CountsInABuffer if kind == "buffer" else Counts
    bench.model = make(bench.model, kind, bench.spec["when"])
    with bench.run() as run:
        for step in run.steps(12):
            bench.learn(run, torch.randn(5, 6), torch.ones(5, 1))
            count = bench.model.calls
            run.log(calls=len(count) if kind == "list" else count)
            if step % 3 == 2:
                run.log(held_out=bench.evaluate(run, step))
    bench.model = bench.model.inner


Pair = namedtuple("Pair", "x y")


def make_batch(kind):
    x, y = torch.rand(5, 6), torch.ones(5, 1)
    if kind == "computed":
        return 2 * x.requires_grad_()
    if kind == "made in inference mode":
        with torch.inference_mode():
            return 2 * x
    return {
        "needs grad": lambda: [y, {"x": x.requires_grad_()}],
        "namedtuple": lambda: Pair(x, y),
        "array": lambda: x.numpy(),
    }[kind]()


def batches(bench):
    """Takes its batches apart, changes what it may, and evaluates."""
    kind = bench.spec["kind"]
    model = bench.model
    with bench.run() as run:
        for step, batch in run.steps(7, [make_batch(kind) for _ in range(7)]):
            if kind in ("needs grad", "computed"):
                x = batch if kind == "computed" else batch[1]["x"]
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                loss = (slope - 1).square().mean()
            elif kind == "namedtuple":
                loss = (model(batch.x.mul_(0.5)) - batch.y).square().mean()
            elif kind == "array":
                batch *= 0.5
                loss = model(torch.from_numpy(batch.copy())).square().mean()
            else:
                loss = model(batch.clone()).square().mean()
            loss.backward()
            run.update(loss, bench.optimizer)
            run.log(loss=loss)
            if step % 3 == 2:
                size = float(batch.sum()) if kind == "array" else 0.0
                run.log(held_out=bench.evaluate(run, step) + size)


LOOPS = (counts, batches)


def main(directory, spec):
    play(LOOPS, directory, spec)


if __name__ == "__main__":
    play_arguments(main)
