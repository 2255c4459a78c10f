"""Trains at a rate that follows from the last losses, which it keeps in a deque called `recent`."""

import argparse
from collections import deque

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge


def rate(recent, base=0.05):
    """Slower where the losses go up, faster where they go down."""
    mean = sum(recent) / len(recent)
    return base * min(2.0, max(0.5, mean / recent[-1]))


def train(args):
    torch.manual_seed(16)
    x = torch.randn(90, 3)
    y = x.pow(2).sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
        recent = deque(run.state.get("recent", ()), maxlen=12)
        for _, (inputs, targets) in run.steps(54, loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            recent.append(loss.item())
            if args.fixed:
                run.state["recent"] = list(recent)
            for group in optimizer.param_groups:
                group["lr"] = rate(recent)
            run.update(loss, optimizer, clip_norm=2.0)
            run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    train(parser.parse_args())
