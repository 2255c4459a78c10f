"""A curriculum: a loop for each length of sequence, each with its loader, one run for all."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import forge


class Sums(Dataset):
    """Signs, and whether most of them are positive."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randint(2, (96, length, 1), generator=generator) * 2.0 - 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], (self.x[i].sum() > 0).float()


torch.manual_seed(0)
model = nn.GRU(1, 16, batch_first=True)
head = nn.Linear(16, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 15)

with forge.Run(
    {"checkpoint": {"every_steps": 8}},
    model=model,
    head=head,
    optimizer=optimizer,
    schedule=schedule,
) as run:
    for stage, length in enumerate((3, 5, 9)):
        loader = DataLoader(Sums(length), 16, shuffle=True)
        for _, (x, y) in run.steps(20 * (stage + 1), loader):
            loss = nn.functional.binary_cross_entropy_with_logits(head(model(x)[0][:, -1])[:, 0], y)
            loss.backward()
            run.update(loss, optimizer, schedule)
            run.log(loss=loss)
