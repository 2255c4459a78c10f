"""A physics-informed network by LBFGS, its update by hand under `run.should_step`."""

import torch
from torch import nn

import forge

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)


def residual(x):
    x = x.requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    start = (model(torch.zeros(1, 1, dtype=torch.float64)) - 1).square().sum()
    return (du + u).square().mean() + start


with forge.Run({"checkpoint": {"every_steps": 4}}, model=model, optimizer=optimizer) as run:
    for _ in run.steps(24):
        points = torch.rand(32, 1, dtype=torch.float64)

        def closure(points=points):
            optimizer.zero_grad()
            loss = residual(points)
            loss.backward()
            return loss

        loss = closure()
        if run.should_step(loss):
            optimizer.step(closure)
        optimizer.zero_grad()
        run.log(loss=loss)
