"""Contrastive learning with a momentum encoder; the memory bank and its place are buffers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class MoCo(nn.Module):
    def __init__(self, encoder, width, size=64, momentum=0.95, temperature=0.2):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.query = encoder
        self.key = copy.deepcopy(encoder).requires_grad_(False)
        self.register_buffer("bank", F.normalize(torch.randn(size, width), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.momentum)

    @torch.no_grad()
    def remember(self, keys):
        place = int(self.place)
        self.bank[place : place + len(keys)] = keys
        self.place.fill_((place + len(keys)) % len(self.bank))

    def forward(self, view, other):
        self.follow()
        queries = F.normalize(self.query(view), dim=1)
        keys = F.normalize(self.key(other), dim=1)
        same = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([same, queries @ self.bank.clone().T], 1) / self.temperature
        self.remember(keys)
        return F.cross_entropy(logits, torch.zeros(len(view), dtype=torch.long))


def view_of(x):
    return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)


torch.manual_seed(0)
centres = torch.randn(8, 16)
x = centres[torch.arange(128) % 8] + 0.3 * torch.randn(128, 16)
loader = DataLoader(TensorDataset(x), 16, shuffle=True, drop_last=True)
model = MoCo(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), 8)
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _, (batch,) in run.steps(60, loader):
        loss = model(view_of(batch), view_of(batch))
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
