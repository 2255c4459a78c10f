"""Early stopping: the best value and the count of bad epochs are in `run.state`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge

torch.manual_seed(0)
inputs = torch.randn(160, 8)
targets = inputs.sum(1, keepdim=True) + torch.randn(160, 1)
loader = DataLoader(TensorDataset(inputs[:80], targets[:80]), 8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
policy = {"checkpoint": {"dir": "early_stopping", "every_steps": 20}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    run.state["best"], run.state["bad"] = float("inf"), 0
    for _ in run.epochs(40):
        for _, (x, y) in run.batches(loader):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer)
        with torch.no_grad():
            value = (model(inputs[80:]) - targets[80:]).square().mean().item()
        is_better = value < run.state["best"]
        run.state["bad"] = 0 if is_better else run.state["bad"] + 1
        run.state["best"] = min(value, run.state["best"])
        if run.state["bad"] == 4:
            break
print("stopped after", run.step, "steps at", run.state["best"])
