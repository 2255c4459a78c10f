"""Accelerate by itself: samplers with a seed, a StatefulDataLoader, one loop over all epochs."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from plain import open_run
from tiny import RANK
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(6)
config = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
accelerator = Accelerator(cpu=True, dataloader_config=config, mixed_precision="bf16")
x = torch.randn(30, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with open_run(accelerator) as run:
    for _, (inputs, targets) in run.steps(37, loader):
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
torch.save({"model": model.state_dict(), "drawn": torch.rand(2)}, f"final_{RANK}.pt")
