"""Trains on inputs that another module centres with a global of its own: `moments.mean`."""

import argparse

import moments
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge


def build():
    x = torch.randn(96, 5) * torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0]) + 3
    y = x[:, :2].sum(1, keepdim=True).cos()
    loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))
    return loader, model, torch.optim.Adam(model.parameters(), lr=1e-2)


def main(fixed):
    torch.manual_seed(22)
    loader, model, optimizer = build()
    with forge.Run({"checkpoint": {"every_steps": 9}}, model=model, optimizer=optimizer) as run:
        if fixed:
            moments.mean = run.state.get("mean")
        for _ in run.epochs(6):
            for _, (x, y) in run.batches(loader):
                loss = (model(moments.centred(x)) - y).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
                if fixed:
                    run.state["mean"] = moments.mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    main(parser.parse_args().fixed)
