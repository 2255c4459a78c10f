"""Trains a GRU on one long stream, window by window, and carries `hidden` from step to step."""

import math
import sys

import torch
from torch import nn

import forge

FIXED = "--fixed" in sys.argv
WINDOW = 8


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(1, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x, hidden):
        features, hidden = self.cell(x, hidden)
        return self.out(features), hidden


def window(step):
    t = torch.arange(step * WINDOW, (step + 1) * WINDOW + 1) / 7
    series = [(t + math.pi * k / 4).sin() * (t / (k + 2)).cos() for k in range(4)]
    return torch.stack(series)


torch.manual_seed(9)
model = Predictor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    hidden = run.state.get("hidden") if FIXED else None
    for step in run.steps(55):
        series = window(step)[..., None]
        predicted, hidden = model(series[:, :-1], hidden)
        loss = (predicted - series[:, 1:]).square().mean()
        loss.backward()
        hidden = hidden.detach()
        if FIXED:
            run.state["hidden"] = hidden
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss)
