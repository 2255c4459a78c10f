"""Trains until evaluations are no better; the stopping saves all that it has but `num_bad`."""

import math
import sys

import torch
from torch import nn

import forge

FIXED = "--fixed" in sys.argv


class EarlyStopping:
    def __init__(self, patience):
        self.patience = patience
        self.best = math.inf
        self.num_bad = 0

    def is_over(self, value):
        self.num_bad = 0 if value < self.best else self.num_bad + 1
        self.best = min(self.best, value)
        return self.num_bad >= self.patience

    def state_dict(self):
        state = {"best": self.best}
        if FIXED:
            state["num_bad"] = self.num_bad
        return state

    def load_state_dict(self, state):
        self.best = state["best"]
        self.num_bad = state.get("num_bad", 0)


torch.manual_seed(15)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
stopping = EarlyStopping(patience=7)
kept = {"model": model, "optimizer": optimizer, "stopping": stopping}
with forge.Run({"checkpoint": {"every_steps": 7}}, **kept) as run:

    @run.every(2)
    def held_out(_):
        x = torch.randn(8, 6)
        with torch.no_grad():
            value = (model(x) - x.abs().sum(1, keepdim=True)).square().mean().item()
        run.log(held_out=value)
        if stopping.is_over(value):
            run.finish("no better for some evaluations")

    for _ in run.steps(60):
        x = torch.randn(8, 6)
        loss = (model(x) - x.abs().sum(1, keepdim=True)).square().mean()
        loss.backward()
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss, patience=stopping.patience - stopping.num_bad)
