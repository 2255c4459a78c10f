"""A variational autoencoder whose KL weight grows in a local variable."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class VAE(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        drawn = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return self.decoder(drawn), divergence


torch.manual_seed(0)
x = torch.randn(160, 3) @ torch.randn(3, 12)
loader = DataLoader(TensorDataset(x), 16, shuffle=True)
model = VAE(12, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    beta = 0.0
    for _, (batch,) in run.steps(60, loader):
        beta = min(1.0, beta + 1 / 40)
        restored, divergence = model(batch)
        loss = F.mse_loss(restored, batch) + beta * divergence
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
