"""A loop without an end that breaks once the smoothed loss is small, which is in run.state."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

torch.manual_seed(0)
x = torch.randn(96, 6)
loader = DataLoader(TensorDataset(x, x @ torch.randn(6, 2)), 16, shuffle=True)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for step, (inputs, targets) in run.steps(None, loader):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        run.update(loss, optimizer)
        smoothed = 0.9 * run.state.get("smoothed", loss.item()) + 0.1 * loss.item()
        run.state["smoothed"] = smoothed
        run.log(loss=loss, smoothed=smoothed)
        if step % 10 == 0:
            print(f"step {step}: {smoothed:.4f}")
        if smoothed < 0.02:
            break
    print(f"converged after {run.step} steps")
