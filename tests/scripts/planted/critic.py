"""Trains a small GAN whose critic holds, steps and keeps to itself an optimizer of its own."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import forge


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=3e-3, betas=(0.5, 0.9))

    def forward(self, x):
        return self.net(x)

    def learn(self, real, fake):
        self.optimizer.zero_grad()
        loss = F.softplus(-self(real)).mean() + F.softplus(self(fake)).mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main(fixed):
    torch.manual_seed(12)
    generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
    critic = Critic()
    optimizer = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    kept = {"generator": generator, "critic": critic, "optimizer": optimizer}
    if fixed:
        kept["critic_optimizer"] = critic.optimizer
    with forge.Run({"checkpoint": {"every_steps": 10}}, **kept) as run:
        for _ in run.steps(45):
            real = torch.randn(32, 2) * torch.tensor([1.0, 0.2]) + 1
            fake = generator(torch.randn(32, 4))
            critic_loss = critic.learn(real, fake.detach())
            loss = F.softplus(-critic(fake)).mean()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss, critic_loss=critic_loss)


if __name__ == "__main__":
    main("--fixed" in sys.argv)
