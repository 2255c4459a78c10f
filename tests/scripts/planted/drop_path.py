"""Trains a residual net that drops more as it has seen more, by a count in a class: `seen`."""

import sys

import torch
from torch import nn

import forge

FIXED = "--fixed" in sys.argv


class DropPath(nn.Module):
    seen = 0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if not self.training:
            return x + self.inner(x)
        DropPath.seen += len(x)
        rate = min(0.5, DropPath.seen / 4000)
        keep = (torch.rand(len(x), 1) >= rate) / (1 - rate)
        return x + keep * self.inner(x)


def block(width):
    return DropPath(nn.Sequential(nn.Linear(width, width), nn.Tanh()))


torch.manual_seed(20)
model = nn.Sequential(nn.Linear(3, 12), block(12), block(12), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
held_out = torch.randn(32, 3)
with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    if FIXED:
        DropPath.seen = run.state.get("seen", 0)

    @run.every(15, at_end=True)
    def evaluate(_):
        model.eval()
        with torch.no_grad():
            error = (model(held_out) - held_out.prod(1, keepdim=True)).abs().mean()
        model.train()
        run.log(error=error)

    for _ in run.steps(50):
        x = torch.randn(32, 3)
        loss = (model(x) - x.prod(1, keepdim=True)).abs().mean()
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
        if FIXED:
            run.state["seen"] = DropPath.seen
