"""A reward model from two sets of preferences, whose loaders are zipped."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class RewardModel(nn.Module):
    def __init__(self, num_tokens, width):
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0][:, -1])[:, 0]


def preferences(count, wanted):
    one, other = torch.randint(20, (2, count, 10))
    is_first = (one == wanted).sum(1, keepdim=True) >= (other == wanted).sum(1, keepdim=True)
    chosen, rejected = torch.where(is_first, one, other), torch.where(is_first, other, one)
    return TensorDataset(chosen, rejected)


def ranking_loss(model, pairs):
    chosen, rejected = pairs
    return -F.logsigmoid(model(chosen) - model(rejected)).mean()


torch.manual_seed(0)
helpful = DataLoader(preferences(96, wanted=3), 8, shuffle=True)
harmless = DataLoader(preferences(64, wanted=7), 8, shuffle=True)
model = RewardModel(20, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _, (first, second) in run.steps(50, zip(helpful, harmless, strict=False)):
        loss = ranking_loss(model, first) + ranking_loss(model, second)
        loss.backward()
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss)
