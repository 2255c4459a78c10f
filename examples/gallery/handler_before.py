"""A training with a signal handler of its own: `python handler_before.py`."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS = 600
CHECKPOINT = Path("runs/handler/checkpoint.pt")


def main() -> None:
    """Learn the sum of eight numbers."""
    stopping = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: stopping.append(number))
    torch.manual_seed(0)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step, best = 0, float("inf")
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, best = saved["step"], saved["best"]
    while step < STEPS:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            best = min(best, loss.item())
            step += 1
            if stopping or step % 200 == 0 or step == STEPS:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state | {"step": step, "best": best}, "checkpoint.new")
                os.replace("checkpoint.new", CHECKPOINT)
            if stopping:
                sys.exit(0)
            if step == STEPS:
                break
    print(f"best loss {best:.6f}")


if __name__ == "__main__":
    main()
