"""Trains a head on frozen features, whose dropout a step switches off: `extractor.eval()`."""

import sys

import torch
from torch import nn

import forge

FIXED = "--fixed" in sys.argv
NOISY_STEPS = 6


def frozen():
    extractor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5))
    return extractor.requires_grad_(False)


def target(x):
    return x[:, :4].sum(1, keepdim=True).relu()


torch.manual_seed(11)
extractor = frozen()
head = nn.Linear(32, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
trained = {"head": head, "optimizer": optimizer}
if FIXED:
    trained["extractor"] = extractor

with forge.Run({"checkpoint": {"every_steps": 10}}, **trained) as run:

    @run.every(10)
    def report(_):
        with torch.no_grad():
            run.log(norm=head.weight.norm())

    for step in run.steps(40):
        if step == NOISY_STEPS:
            extractor.eval()
        x = torch.randn(16, 8)
        loss = (head(extractor(x)) - target(x)).square().mean()
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
