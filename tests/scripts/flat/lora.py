"""Low-rank adapters on a frozen model, of which only the adapters are registered."""

import torch
from torch import nn
from torch.nn import functional as F

import forge


class LoRA(nn.Module):
    def __init__(self, width, rank=2):
        super().__init__()
        self.down = nn.Parameter(0.02 * torch.randn(rank, width))
        self.up = nn.Parameter(torch.zeros(width, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(x) @ self.down.T @ self.up.T


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False).eval()
        self.adapters = nn.ModuleList(LoRA(16) for _ in base)

    def forward(self, x):
        for layer, adapter in zip(self.base, self.adapters, strict=True):
            x = torch.tanh(layer(x) + adapter(x))
        return x


torch.manual_seed(0)
base = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))  # as if read from a file
model = Adapted(base)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)

with forge.Run(
    {"checkpoint": {"every_steps": 10}},
    adapters=model.adapters,
    optimizer=optimizer,
    schedule=schedule,
) as run:
    for _ in run.steps(60):
        x = torch.randn(16, 16)
        loss = F.mse_loss(model(x), x.roll(1, dims=1).sign())
        loss.backward()
        run.update(loss, optimizer, schedule, clip_norm=0.5)
        run.log(loss=loss)
