"""Trains a classifier and evaluates the average of its weights, a dict of tensors called `ema`."""

import argparse

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


def update(ema, model, decay=0.9):
    with torch.no_grad():
        for name, p in model.named_parameters():
            ema[name].lerp_(p, 1 - decay)


def main(fixed):
    torch.manual_seed(6)
    x = torch.randn(160, 2)
    y = (x.norm(dim=1) > 1.1).long()
    loader = DataLoader(TensorDataset(x[:128], y[:128]), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    with forge.Run({"checkpoint": {"every_steps": 9}}, model=model, optimizer=optimizer) as run:
        if fixed:
            ema = run.state.setdefault("ema", ema)

        @run.every(6, at_end=True)
        def held_out(_):
            with torch.no_grad():
                run.log(held_out=F.cross_entropy(functional_call(model, ema, x[128:]), y[128:]))

        for _, (inputs, labels) in run.steps(48, loader):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            run.update(loss, optimizer, clip_norm=1.0)
            update(ema, model)
            run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    main(parser.parse_args().fixed)
