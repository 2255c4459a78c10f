"""A loop over epochs and one over batches, with an evaluation after each pass."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

EPOCHS = 5

torch.manual_seed(0)
x = torch.randn(120, 6)
y = x.sin().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(x[:96], y[:96]), 8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

with forge.Run(
    {"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer, schedule=schedule
) as run:
    for epoch in run.epochs(EPOCHS):
        for _, (inputs, targets) in run.batches(loader):
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
        schedule.step()
        model.eval()
        with torch.no_grad():
            held_out = F.mse_loss(model(x[96:]), y[96:])
        model.train()
        run.log(held_out=held_out)
        print(f"epoch {epoch}: {held_out.item():.4f}")
