"""Trains a classifier whose sampler shuffles its list further in each epoch, and keeps `order`."""

import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import forge


class Reshuffled(Sampler):
    def __init__(self, size):
        self.order = list(range(size))

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        random.shuffle(self.order)
        return iter(list(self.order))


class SavedReshuffled(Reshuffled):
    exact = True

    def state_dict(self):
        return {"order": list(self.order)}

    def load_state_dict(self, state):
        self.order = list(state["order"])


random.seed(0)
torch.manual_seed(0)
x = torch.randn(80, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
sampler = SavedReshuffled(len(x)) if "--fixed" in sys.argv else Reshuffled(len(x))
loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with forge.Run({"checkpoint": {"every_steps": 9}}, model=model, optimizer=optimizer) as run:
    for _, (inputs, labels) in run.steps(45, loader):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
