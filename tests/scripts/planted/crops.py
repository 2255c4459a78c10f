"""Trains a convolution on crops whose width comes from an endless iterator, `scales`."""

import itertools
import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import forge

WIDTHS = random.Random(18).choices(range(8, 17), k=64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().mean(-1))


def main(fixed):
    torch.manual_seed(18)
    loader = DataLoader(torch.randn(60, 1, 16).cumsum(-1), batch_size=12, shuffle=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with forge.Run({"checkpoint": {"every_steps": 10}}, net=net, optimizer=optimizer) as run:
        scales = itertools.cycle(WIDTHS)
        if fixed:
            scales = itertools.islice(scales, run.step % len(WIDTHS), None)
        for _, series in run.steps(45, loader):
            cropped = series[..., : next(scales)]
            loss = (net(cropped) - series.std(-1)).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)


main("--fixed" in sys.argv)
