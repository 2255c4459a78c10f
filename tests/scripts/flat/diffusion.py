"""A denoising diffusion model of points, with an average of its weights by hand."""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forge

STEPS = 100


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.out = nn.Linear(64, 2)

    def forward(self, x, t):
        return self.out(self.net(torch.cat([x, t[:, None] / STEPS], 1)))


@torch.no_grad()
def follow(average, model, decay):
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)


@torch.no_grad()
def error(model, points, kept):
    generator = torch.Generator().manual_seed(5)
    t = torch.randint(STEPS, (len(points),), generator=generator)
    noise = torch.randn(points.shape, generator=generator)
    noisy = kept[t, None].sqrt() * points + (1 - kept[t, None]).sqrt() * noise
    return (model(noisy, t) - noise).square().mean()


def main(is_average_saved):
    torch.manual_seed(0)
    angle = torch.linspace(0, 12, 256)
    points = torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 12
    loader = DataLoader(TensorDataset(points), 32, shuffle=True)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), 0)
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    objects = {"model": model, "optimizer": optimizer}
    if is_average_saved:
        objects["average"] = average
    with forge.Run({"checkpoint": {"every_steps": 15}}, **objects) as run:
        for step, (x,) in run.steps(60, loader):
            t = torch.randint(STEPS, (len(x),))
            noise = torch.randn_like(x)
            noisy = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * noise
            loss = (model(noisy, t) - noise).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            follow(average, model, 0.95)
            run.log(loss=loss)
            if step % 10 == 9:
                run.log(average_error=error(average, points, kept))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--forget-average", action="store_true")
    main(not parser.parse_args().forget_average)
