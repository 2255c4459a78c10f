"""Accumulated gradients: one update for four batches. A stop between them saves the gradients."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge

EVERY = 4
torch.manual_seed(0)
inputs = torch.randn(256, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
policy = {"checkpoint": {"dir": "accumulation", "every_steps": 18}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for step, (x, y) in run.steps(100, loader):
        loss = (model(x) - y).square().mean() / EVERY
        loss.backward()
        if (step + 1) % EVERY == 0:
            run.update(loss, optimizer, clip_norm=1.0)
            optimizer.zero_grad()
print("weights", model.weight.tolist())
