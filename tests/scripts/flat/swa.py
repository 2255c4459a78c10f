"""Stochastic weight averaging: AveragedModel, SWALR, BatchNorm renewed at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import forge

torch.manual_seed(0)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 12, shuffle=True)
model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 30], gamma=0.5)
average, slow = AveragedModel(model), SWALR(optimizer, swa_lr=0.005, anneal_epochs=10)

with forge.Run(
    {"checkpoint": {"every_steps": 10}},
    model=model,
    average=average,
    optimizer=optimizer,
    schedule=schedule,
    slow=slow,
) as run:
    for step, (inputs, targets) in run.steps(64, loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        run.update(loss, optimizer)
        if step < 40:
            schedule.step()
        else:
            average.update_parameters(model)
            slow.step()
        run.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
    update_bn(((x,) for x, _ in loader), average)
