"""A Trainer that holds everything, with a linear schedule; the loss it sums up is an attribute."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

LOGGING_STEPS = 7


def linear_rate(step, num_warmup, num_steps):
    if step < num_warmup:
        return step / num_warmup
    return max(0.0, (num_steps - step) / (num_steps - num_warmup))


def get_linear_schedule_with_warmup(optimizer, num_warmup, num_steps):
    rate = partial(linear_rate, num_warmup=num_warmup, num_steps=num_steps)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class Trainer:
    def __init__(self, model, train_data, eval_data, epochs):
        generator = torch.Generator().manual_seed(42)
        self.model, self.eval_data, self.epochs = model, eval_data, epochs
        self.loader = DataLoader(train_data, 8, shuffle=True, generator=generator)
        num_steps = epochs * len(self.loader)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 6, num_steps)
        self.tr_loss = 0.0

    def compute_loss(self, inputs):
        tokens, labels = inputs
        return F.cross_entropy(self.model(tokens), labels)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        loss = self.compute_loss(self.eval_data[:])
        self.model.train()
        return loss

    def train(self):
        kept = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        with forge.Run({"checkpoint": {"every_steps": 10}}, **kept) as run:
            for _ in run.epochs(self.epochs):
                for step, inputs in run.batches(self.loader):
                    loss = self.compute_loss(inputs)
                    loss.backward()
                    run.update(loss, self.optimizer, self.schedule, clip_norm=1.0)
                    self.tr_loss += loss.item()
                    run.log(loss=loss)
                    if (step + 1) % LOGGING_STEPS == 0:
                        run.log(mean_loss=self.tr_loss / LOGGING_STEPS)
                        self.tr_loss = 0.0
                run.log(eval_loss=self.evaluate())


torch.manual_seed(42)
tokens = torch.randint(50, (128, 12))
data = TensorDataset(tokens, (tokens.sum(1) > 294).long())
train_data, eval_data = torch.utils.data.random_split(data, [104, 24])
model = nn.Sequential(nn.EmbeddingBag(50, 16), nn.Dropout(0.1), nn.Linear(16, 2))
Trainer(model, train_data, eval_data, epochs=4).train()
