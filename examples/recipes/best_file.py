"""The best weights in a file of their own, for other programs; `run.state` keeps the best value."""

import os

import torch
from torch import nn

import forge

torch.manual_seed(0)
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True) + torch.randn(256, 1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.2)
policy = {"checkpoint": {"dir": "best_file", "every_steps": 20}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:

    @run.every(5)
    def keep_best(step: int) -> None:
        """Evaluate, and write the file if the value is better."""
        with torch.no_grad():
            value = (model(inputs[:128]) - targets[:128]).square().mean().item()
        if value < run.state.get("best", float("inf")):
            run.state["best"] = value
            torch.save(model.state_dict(), "best.pt.new")
            os.replace("best.pt.new", "best.pt")  # never half a file, whenever the job is killed

    for _ in run.steps(100):
        rows = torch.randint(128, 256, (8,))
        loss = (model(inputs[rows]) - targets[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.update(loss, optimizer)
print("best", run.state["best"], torch.load("best.pt")["weight"].tolist())
