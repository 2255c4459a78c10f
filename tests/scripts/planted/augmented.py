"""Trains a regression on mixed pairs; the augmentation keeps a `random.Random` to itself."""

import argparse
import random

import torch
from torch import nn

import forge


class Mixup:
    def __init__(self, alpha, seed):
        self.alpha = alpha
        self.rng = random.Random(seed)

    def __call__(self, x, y):
        share = self.rng.betavariate(self.alpha, self.alpha)
        other = self.rng.sample(range(len(x)), len(x))
        return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


def main(fixed):
    torch.manual_seed(1)
    augment = Mixup(0.4, seed=1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    kept = {"model": model, "optimizer": optimizer}
    if fixed:
        kept["augment_rng"] = augment.rng
    with forge.Run({"checkpoint": {"every_steps": 10}}, **kept) as run:
        for _ in run.steps(50):
            x = torch.randn(24, 5)
            x, y = augment(x, x.prod(dim=1, keepdim=True))
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.update(loss, optimizer, clip_norm=1.0)
            run.log(loss=loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    main(parser.parse_args().fixed)
