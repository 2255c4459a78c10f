"""Two domains of data, a large and a small one, the latter read from itertools.cycle."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

torch.manual_seed(0)
source = torch.randn(160, 6)
target = 1.5 * torch.randn(48, 6) + 0.5
source_loader = DataLoader(TensorDataset(source, (source.sum(1) > 0).long()), 16, shuffle=True)
target_loader = DataLoader(TensorDataset(target), 16, shuffle=True)
encoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1))
head = nn.Linear(24, 2)
optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=5e-3)
targets = itertools.cycle(target_loader)

with forge.Run(
    {"checkpoint": {"every_steps": 10}}, encoder=encoder, head=head, optimizer=optimizer
) as run:
    for _, (inputs, labels) in run.steps(60, source_loader):
        (others,) = next(targets)
        features, moved = encoder(inputs), encoder(others)
        distance = (features.mean(0) - moved.mean(0)).square().sum()
        loss = F.cross_entropy(head(features), labels) + 0.1 * distance
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
