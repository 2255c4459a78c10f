"""Trains in epochs, with a worker, and weighs more what it found hard: a dict called `hard`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge


class Indexed(Dataset):
    def __init__(self, size):
        self.x = torch.randn(size, 4)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


def weighted(losses, indices, hard):
    """Their mean, with up to twice the weight for what was hard when it was last seen."""
    weights = torch.tensor([1 + hard.get(i, 0.0) for i in indices])
    for i, one in zip(indices, losses.tolist(), strict=True):
        if one > 0.5:
            hard[i] = min(1.0, one)
        else:
            hard.pop(i, None)
    return (weights * losses).mean()


def main(fixed):
    torch.manual_seed(23)
    loader = DataLoader(Indexed(100), batch_size=10, shuffle=True, num_workers=1)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with forge.Run({"checkpoint": {"every_steps": 8}}, model=model, optimizer=optimizer) as run:
        hard = run.state.setdefault("hard", {}) if fixed else {}
        for _ in run.epochs(5):
            for _, (indices, x, y) in run.batches(loader):
                losses = nn.functional.binary_cross_entropy_with_logits(
                    model(x)[:, 0], y, reduction="none"
                )
                loss = weighted(losses, indices.tolist(), hard)
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)


if __name__ == "__main__":
    main("--fixed" in sys.argv)
