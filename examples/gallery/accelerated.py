"""A loop with Accelerate: three lines more than without forge."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import forge.integrations.accelerate


def main() -> None:
    """Learn the sum of eight numbers, with dropout and accumulated gradients."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    x = torch.randn(2048, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, True)), 32, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    policy = {"checkpoint": {"dir": "runs/accelerated", "every_steps": 50}}
    with forge.integrations.accelerate.AcceleratedRun(policy, accelerator) as run:
        for _ in run.epochs(5):
            for _, (inputs, targets) in run.batches(loader):
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and not run.should_step(loss):
                        optimizer.zero_grad()  # the NaN policy skips this update
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        print(f"{run.step} batches, bias {accelerator.unwrap_model(model)[2].bias.item():.4f}")


if __name__ == "__main__":
    main()
