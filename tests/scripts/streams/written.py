"""Train a small regressor on an endless synthetic stream that is read by two workers."""

import hydra
import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import forge

STEPS, SEED = 80, 0

ConfigStore.instance().store("config", {"defaults": [{"resilience": "default"}, "_self_"]})


class Stream(IterableDataset):
    def __iter__(self):
        rng = np.random.default_rng([SEED, get_worker_info().id])
        while True:
            x = torch.from_numpy(rng.standard_normal(16, dtype=np.float32))
            yield x, x[:4].sin().sum() + 0.05 * torch.randn(())


@hydra.main(version_base=None, config_name="config")
def main(cfg):
    torch.manual_seed(SEED)
    loader = DataLoader(Stream(), batch_size=32, num_workers=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        for _, (x, y) in run.steps(STEPS, loader):
            loss = F.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = F.mse_loss(model(x).squeeze(1), x[:, :4].sin().sum(1))
    print(f"held-out error {error:.4f}")


if __name__ == "__main__":
    main()
