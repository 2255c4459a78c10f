"""Trains on samples that become harder with the level that the dataset holds, `dataset.level`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge


class Waves(Dataset):
    def __init__(self, size):
        self.phase = torch.rand(size, 1) * 6
        self.level = 0.2

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, index):
        x = self.phase[index] + torch.linspace(0, 1, 10)
        return x.sin(), (self.level * self.phase[index]).cos()

    def harder(self, loss):
        self.level = min(2.0, self.level * (1.02 if loss > 0.1 else 1.1))

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


torch.manual_seed(13)
dataset = Waves(64)
loader = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept = {"dataset": dataset} if "--fixed" in sys.argv else {}
policy = {"checkpoint": {"every_steps": 9}}
with forge.Run(policy, model=model, optimizer=optimizer, **kept) as run:
    for _, (x, y) in run.steps(44, loader):
        loss = (model(x) - y).square().mean()
        loss.backward()
        run.update(loss, optimizer)
        dataset.harder(loss.item())
        run.log(loss=loss)
