"""Trains discrete codes at a temperature that a generator function lowers, `temperatures`."""

import itertools
import sys

import torch
from torch import nn
from torch.nn import functional as F

import forge

FIXED = "--fixed" in sys.argv


def anneal(start, first=2.0, last=0.3, factor=0.96):
    """The temperature of step `start`, then those of the next ones."""
    for n in itertools.count(start):
        yield max(last, first * factor**n)


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 12)
        self.decode = nn.Linear(12, 6, bias=False)

    def forward(self, x, temperature):
        return self.decode(F.gumbel_softmax(self.encode(x), tau=temperature))


torch.manual_seed(19)
centres = torch.randn(5, 6)
model = Codes()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
with forge.Run({"checkpoint": {"every_steps": 9}}, model=model, optimizer=optimizer) as run:
    temperatures = anneal(run.step if FIXED else 0)
    for _ in run.steps(45):
        x = centres[torch.randint(5, (24,))] + 0.1 * torch.randn(24, 6)
        loss = (model(x, next(temperatures)) - x).square().mean()
        loss.backward()
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss)
