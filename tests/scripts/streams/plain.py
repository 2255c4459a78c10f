"""Train a small regressor on an endless synthetic stream that is read by two workers."""

from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

STEPS, SEED = 80, 0


class Stream(IterableDataset):
    def __iter__(self):
        rng = np.random.default_rng([SEED, get_worker_info().id])
        while True:
            x = torch.from_numpy(rng.standard_normal(16, dtype=np.float32))
            yield x, x[:4].sin().sum() + 0.05 * torch.randn(())


def main():
    torch.manual_seed(SEED)
    loader = DataLoader(Stream(), batch_size=32, num_workers=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (x, y) in enumerate(islice(loader, STEPS)):
        loss = F.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item():.4f}")
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = F.mse_loss(model(x).squeeze(1), x[:, :4].sin().sum(1))
    print(f"held-out error {error:.4f}")


if __name__ == "__main__":
    main()
