"""A moving average of the weights, given to forge.Run and updated after each update."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import forge

torch.manual_seed(0)
model = nn.Linear(8, 1)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
policy = {"checkpoint": {"dir": "ema", "every_steps": 20}}
with forge.Run(policy, model=model, ema=ema, optimizer=optimizer) as run:
    for _ in run.steps(100):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.update(loss, optimizer)
        ema.update_parameters(model)
print("average", ema.module.weight.tolist())
