"""A plain loop over steps, with Hydra: `python plain_loop.py`."""

from typing import Any

import hydra
import torch
from torch.utils.data import DataLoader, TensorDataset

import forge

# Hydra 1.3 warns without a version_base, and Hydra 1.4 warns of one.
VERSION_BASE = {"version_base": None} if hydra.__version__ < "1.4" else {}


@hydra.main(**VERSION_BASE, config_path=".", config_name="plain_loop")
def main(cfg: Any) -> None:
    """Learn the sum of eight numbers."""
    torch.manual_seed(cfg.seed)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg.steps)

    with forge.Run(cfg.resilience, model=model, optimizer=optimizer, schedule=schedule) as run:
        for step, (inputs, targets) in run.steps(cfg.steps, loader):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer, schedule, clip_norm=1.0)
            run.log(loss=loss)
            if step % 500 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
    print(f"trained {run.step} steps")


if __name__ == "__main__":
    main()
