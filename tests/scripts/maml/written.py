"""MAML on sine waves; the tasks draw from a generator of their own, which nothing saves."""

import math
import random

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import forge


class SineTasks:
    def __init__(self, seed):
        self.rng = random.Random(seed)

    def draw(self, num_points):
        amplitude, phase = self.rng.uniform(0.5, 2.0), self.rng.uniform(0, math.pi)
        x = 10 * torch.rand(2, num_points, 1) - 5
        y = amplitude * torch.sin(x + phase)
        return x[0], y[0], x[1], y[1]


def adapted(model, x, y, num_steps=2, rate=0.02):
    weights = dict(model.named_parameters())
    for _ in range(num_steps):
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {
            name: weight - rate * grad
            for (name, weight), grad in zip(weights.items(), grads, strict=True)
        }
    return weights


torch.manual_seed(0)
tasks = SineTasks(seed=1)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _ in run.steps(50):
        loss = torch.zeros(())
        for _ in range(4):
            x, y, query_x, query_y = tasks.draw(10)
            weights = adapted(model, x, y)
            loss = loss + F.mse_loss(functional_call(model, weights, (query_x,)), query_y) / 4
        loss.backward()
        run.update(loss, optimizer, clip_norm=10.0)
        run.log(loss=loss)
