"""Trains with a schedule written by hand, which counts its updates in `num_updates`."""

import sys

import torch
from torch import nn

import forge


class InverseRoot:
    """Up to the full rate in `warmup` updates, then down with the root of their number."""

    def __init__(self, optimizer, peak, warmup):
        self.optimizer = optimizer
        self.peak = peak
        self.warmup = warmup
        self.num_updates = 0

    def state_dict(self):
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state):
        self.num_updates = state["num_updates"]

    def step(self):
        self.num_updates += 1
        n = self.num_updates
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * min(n / self.warmup, (self.warmup / n) ** 0.5)


def build():
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return model, optimizer, InverseRoot(optimizer, peak=2e-2, warmup=10)


torch.manual_seed(4)
model, optimizer, schedule = build()
objects = {"model": model, "optimizer": optimizer}
if "--fixed" in sys.argv:
    objects["schedule"] = schedule
with forge.Run({"checkpoint": {"every_steps": 12}}, **objects) as run:
    for _ in run.steps(60):
        x = torch.randn(16, 6)
        loss = (model(x) - x[:, :1] * x[:, 1:2]).abs().mean()
        loss.backward()
        run.update(loss, optimizer)
        schedule.step()
        run.log(loss=loss)
