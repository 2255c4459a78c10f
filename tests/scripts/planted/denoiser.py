"""Trains a denoising autoencoder; what corrupts its input keeps a numpy generator, `rng`."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import forge

FIXED = "--fixed" in sys.argv


def corruption(rate, rng):
    def corrupt(x):
        keep = rng.random(tuple(x.shape), dtype=np.float32) > rate
        return x * torch.from_numpy(keep)

    return corrupt


def main():
    torch.manual_seed(2)
    data = torch.randn(96, 3) @ torch.randn(3, 12)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with forge.Run({"checkpoint": {"every_steps": 8}}, **objects) as run:
        rng = np.random.default_rng(2)
        if FIXED:
            rng = run.state.setdefault("rng", rng)
        corrupt = corruption(0.3, rng)
        for _, batch in run.steps(48, loader):
            loss = (model(corrupt(batch)) - batch).square().mean()
            loss.backward()
            run.update(loss, optimizer, schedule)
            run.log(loss=loss)


if __name__ == "__main__":
    main()
