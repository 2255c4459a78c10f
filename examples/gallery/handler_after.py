"""The training of handler_before.py with forge: `python handler_after.py`."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import forge

STEPS = 600
POLICY = {"checkpoint": {"dir": "runs/handler", "every_steps": 200}}


def main() -> None:
    """Learn the sum of eight numbers."""
    torch.manual_seed(0)
    x = torch.randn(4096, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with forge.Run(POLICY, model=model, optimizer=optimizer) as run:
        run.state.setdefault("best", float("inf"))
        for _, (inputs, targets) in run.steps(STEPS, loader):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            run.update(loss, optimizer)
            run.state["best"] = min(run.state["best"], loss.item())
    print(f"best loss {run.state['best']:.6f}")


if __name__ == "__main__":
    main()
