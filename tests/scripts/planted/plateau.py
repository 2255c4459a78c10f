"""Trains in epochs, lowers the rate unless the best value improves, and keeps `trainer.best`."""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge

FIXED = "--fixed" in sys.argv


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.x = torch.randn(128, 4)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.best = math.inf

    def evaluate(self):
        self.model.eval()
        drawn = torch.randint(96, 128, (16,))
        with torch.no_grad():
            value = (self.model(self.x[drawn]) - self.y[drawn]).square().mean().item()
        self.model.train()
        return value

    def fit(self, num_epochs):
        loader = DataLoader(TensorDataset(self.x[:96], self.y[:96]), batch_size=16, shuffle=True)
        kept = {"model": self.model, "optimizer": self.optimizer}
        with forge.Run({"checkpoint": {"every_steps": 8}}, **kept) as run:
            if FIXED:
                self.best = run.state.get("best", self.best)
            for _ in run.epochs(num_epochs):
                for _, (x, y) in run.batches(loader):
                    loss = (self.model(x) - y).square().mean()
                    loss.backward()
                    run.update(loss, self.optimizer)
                    run.log(loss=loss, best=self.best)
                value = self.evaluate()
                if value > self.best:
                    self.optimizer.param_groups[0]["lr"] *= 0.6
                self.best = min(self.best, value)
                if FIXED:
                    run.state["best"] = self.best


torch.manual_seed(7)
trainer = Trainer()
trainer.fit(9)
