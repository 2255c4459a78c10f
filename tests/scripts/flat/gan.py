"""A GAN: two models, two optimizers, two updates a step, spectral norm."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import forge

torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(
    spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1))
)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.999))

with forge.Run(
    {"checkpoint": {"every_steps": 10}},
    maker=maker,
    critic=critic,
    maker_optimizer=maker_optimizer,
    critic_optimizer=critic_optimizer,
) as run:
    for _ in run.steps(60):
        angle = 6.28 * torch.rand(32)
        real = torch.stack([angle.cos(), angle.sin()], 1)
        fake = maker(torch.randn(32, 4))
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        critic_loss.backward()
        run.update(critic_loss, critic_optimizer)
        maker_loss = F.softplus(-critic(fake)).mean()
        maker_loss.backward()
        run.update(maker_loss, maker_optimizer)
        critic_optimizer.zero_grad()
        run.log(critic_loss=critic_loss, maker_loss=maker_loss)
