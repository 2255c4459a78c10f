"""A regression without Hydra, on data drawn in the loop."""

import random

import numpy as np
import torch
from torch import nn

import forge

torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _ in run.steps(60):
        x = torch.randn(32, 8) + np.random.normal(scale=0.1) + random.gauss(0, 0.1)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss)
