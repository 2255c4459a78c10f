"""Labelled batches by `run.steps`; unlabelled ones by an iterator beside it that nothing saves."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

torch.manual_seed(0)
x = torch.randn(160, 6)
labelled = DataLoader(TensorDataset(x[:40], (x[:40].sum(1) > 0).long()), 8, shuffle=True)
unlabelled = DataLoader(TensorDataset(x[40:]), 24, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
others = iter(unlabelled)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _, (batch, labels) in run.steps(60, labelled):
        try:
            (other,) = next(others)
        except StopIteration:
            others = iter(unlabelled)
            (other,) = next(others)
        consistency = F.mse_loss(model(other + 0.1 * torch.randn_like(other)), model(other))
        loss = F.cross_entropy(model(batch), labels) + consistency
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
