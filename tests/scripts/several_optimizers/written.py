"""Matrices by SGD, the rest by Adam: an update for each of the two optimizers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import forge

STEPS = 60

torch.manual_seed(0)
x = torch.randn(160, 12)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 16, shuffle=True)
model = nn.Sequential(nn.Linear(12, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 4))
matrices = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizers = [
    torch.optim.SGD(matrices, lr=0.1, momentum=0.9, nesterov=True),
    torch.optim.Adam(others, lr=5e-3),
]
schedules = [CosineAnnealingLR(one, STEPS) for one in optimizers]

with forge.Run(
    {"checkpoint": {"every_steps": 10}}, model=model, optimizers=optimizers, schedules=schedules
) as run:
    for _, (inputs, labels) in run.steps(STEPS, loader):
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            run.update(loss, optimizer, schedule, clip_norm=1.0)
        run.log(loss=loss)
