"""An image classifier as timm trains it: warm-up by update, mixup, averaged weights."""

import copy
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

EPOCHS = 5


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for name, slow in self.module.state_dict().items():
            slow.copy_(self.decay * slow + (1 - self.decay) * model.state_dict()[name])


class WarmupCosine:
    def __init__(self, optimizer, base, warmup, total):
        self.optimizer, self.base, self.warmup, self.total = optimizer, base, warmup, total
        self.step_update(0)

    def step_update(self, num_updates):
        share = min(1.0, (num_updates + 1) / self.warmup)
        rate = self.base * share * (1 + math.cos(math.pi * num_updates / self.total)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def mixup(x, labels):
    share = np.random.beta(0.8, 0.8)
    targets = F.one_hot(labels, 4).float()
    return share * x + (1 - share) * x.flip(0), share * targets + (1 - share) * targets.flip(0)


torch.manual_seed(42)
np.random.seed(42)
labels = torch.randint(4, (112,))
images = torch.randn(112, 3, 8, 8) + labels[:, None, None, None]
loader = DataLoader(TensorDataset(images[:96], labels[:96]), 8, shuffle=True, drop_last=True)
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()
model = nn.Sequential(*layers, nn.Linear(8, 4))
ema = ModelEma(model, decay=0.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
schedule = WarmupCosine(optimizer, 5e-3, warmup=15, total=EPOCHS * len(loader))

policy = {"checkpoint": {"every_steps": 10}}
with forge.Run(policy, model=model, ema=ema, optimizer=optimizer) as run:
    for _ in run.epochs(EPOCHS):
        for step, (x, y) in run.batches(loader):
            x, targets = mixup(x, y)
            loss = F.cross_entropy(model(x), targets)
            loss.backward()
            run.update(loss, optimizer)
            ema.update(model)
            schedule.step_update(step + 1)
            run.log(loss=loss)
        run.log(ema_loss=F.cross_entropy(ema.module(images[96:]), labels[96:]))
