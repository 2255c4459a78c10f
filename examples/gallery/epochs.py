"""Epochs with a DataLoader, an evaluation and an early stop, with Hydra: `python epochs.py`."""

import math
from typing import Any

import hydra
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import forge

# Hydra 1.3 warns without a version_base, and Hydra 1.4 warns of one.
VERSION_BASE = {"version_base": None} if hydra.__version__ < "1.4" else {}


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
    """The mean loss over the held-out samples."""
    model.eval()
    losses = [torch.nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in loader]
    model.train()
    return float(sum(losses)) / len(loader.dataset)


@hydra.main(**VERSION_BASE, config_path=".", config_name="epochs")
def main(cfg: Any) -> None:
    """Learn the sum of eight numbers, until the held-out loss no longer falls."""
    torch.manual_seed(cfg.seed)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    training, held_out = random_split(data, [3584, 512])
    loader = DataLoader(training, batch_size=64, shuffle=True, num_workers=cfg.workers)
    held_out_loader = DataLoader(held_out, batch_size=256)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    with forge.Run(cfg.resilience, model=model, optimizer=optimizer, schedule=schedule) as run:
        for epoch in run.epochs(cfg.epochs):
            for _, (inputs, targets) in run.batches(loader):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
            value = evaluate(model, held_out_loader)
            schedule.step(value)
            run.log(held_out=value)
            print(f"epoch {epoch}: held-out loss {value:.4f}")
            if value < run.state.get("best", math.inf):
                run.state["best"], run.state["best_epoch"] = value, epoch
            elif epoch - run.state["best_epoch"] >= cfg.patience:
                run.finish(f"not better for {cfg.patience} epochs")
    print(f"best held-out loss {run.state['best']:.4f}")


if __name__ == "__main__":
    main()
