"""Trains on batches that are fetched one step ahead, and keeps the one to come in `ahead`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import forge

FIXED = "--fixed" in sys.argv


def loss_fn(model, batch):
    return (model(batch) - batch.flip(1)).square().mean()


def endless(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(8)
    loader = forge.data.resumable(DataLoader(torch.randn(70, 6), batch_size=10, shuffle=True))
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    objects = {"model": model, "optimizer": optimizer, "loader": loader}
    with forge.Run({"checkpoint": {"every_steps": 10}}, **objects) as run:
        source = endless(loader)
        ahead = run.state["ahead"] if "ahead" in run.state else next(source)
        if FIXED:
            run.state["ahead"] = ahead
        for _ in run.steps(50):
            batch, ahead = ahead, next(source)
            if FIXED:
                run.state["ahead"] = ahead
            loss = loss_fn(model, batch)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)


main()
