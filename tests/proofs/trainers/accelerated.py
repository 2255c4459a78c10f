"""Accelerate by itself: accumulation, data that draws, a registered object, an evaluation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from plain import open_run
from tiny import RANK
from torch import nn
from torch.utils.data import DataLoader, Dataset

set_seed(5)


class Noisy(Dataset):
    """Points with noise, which is drawn as they are read."""

    x = torch.randn(44, 6)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x + 0.1 * torch.randn(6), x.sum(0, keepdim=True)


class Average:
    """A running mean of the weights, as an object of the script's own."""

    def __init__(self, model):
        self.weights = [one.detach().clone() for one in model.parameters()]

    def update(self, model):
        for mean, one in zip(self.weights, model.parameters(), strict=True):
            mean.lerp_(one.detach(), 0.1)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
held_out = DataLoader(Noisy(), batch_size=8)
model, optimizer, schedule, loader, held_out = accelerator.prepare(
    model, optimizer, schedule, loader, held_out
)
average = Average(model)
accelerator.register_for_checkpointing(average)
losses = []
with open_run(accelerator) as run:

    @run.every(epochs=1)
    def evaluate(step):
        model.eval()
        with torch.no_grad():
            for x, y in held_out:
                found = accelerator.gather_for_metrics((model(x) - y).square())
        run.log(held_out=found.mean())
        model.train()

    for _ in run.epochs(4):
        for _, (x, y) in run.batches(loader):
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            average.update(model)
            run.log(loss=loss)
torch.save(
    {"model": model.state_dict(), "mean": average.weights, "drawn": torch.rand(2)},
    f"final_{RANK}.pt",
)
