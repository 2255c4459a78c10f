"""Batches drawn from an array by a generator of the script's own, which nothing saves."""

import numpy as np
import torch
from torch import nn

import forge

torch.manual_seed(0)
rng = np.random.RandomState(0)
data = rng.randn(500, 5).astype("float32")
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _ in run.steps(60):
        batch = torch.from_numpy(data[rng.randint(len(data), size=16)])
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
