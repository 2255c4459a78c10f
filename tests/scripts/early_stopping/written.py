"""Early stopping by an object that counts, and that nothing saves."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class EarlyStopping:
    def __init__(self, patience, delta):
        self.patience, self.delta = patience, delta
        self.counter, self.best = 0, float("inf")

    def __call__(self, value):
        if value < self.best - self.delta:
            self.best, self.counter = value, 0
        else:
            self.counter += 1
        return self.counter >= self.patience


def main():
    torch.manual_seed(0)
    x = torch.randn(140, 8)
    y = x[:, :2].prod(1, keepdim=True) + 0.5 * torch.randn(140, 1)
    loader = DataLoader(TensorDataset(x[:60], y[:60]), 10, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stopper = EarlyStopping(patience=4, delta=0.01)
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:

        @run.every(5)
        def held_out(_):
            with torch.no_grad():
                value = F.mse_loss(model(x[60:]), y[60:]).item()
            if stopper(value):
                run.finish(f"no better for {stopper.patience} evaluations")
            run.log(held_out=value, best=stopper.best)

        for _, (inputs, targets) in run.steps(80, loader):
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)


if __name__ == "__main__":
    main()
