"""ReduceLROnPlateau driven by the mean of the last losses, which are a deque in run.state."""

from collections import deque

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

SIZE = 8

torch.manual_seed(0)
x = torch.randn(128, 5)
y = x.square().sum(1, keepdim=True) + 0.3 * torch.randn(128, 1)
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)

with forge.Run(
    {"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer, schedule=schedule
) as run:
    window = run.state.setdefault("window", deque(maxlen=SIZE))
    for step, (inputs, targets) in run.steps(70, loader):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        run.update(loss, optimizer)
        window.append(loss.item())
        run.log(loss=loss)
        if step % 4 == 3:
            schedule.step(sum(window) / len(window))
            run.log(lr=optimizer.param_groups[0]["lr"])
