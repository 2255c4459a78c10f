"""Batches that are prepared one ahead, by an iterable that is given to run.steps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class Prefetcher:
    def __init__(self, loader, mean, std):
        self.loader, self.mean, self.std = loader, mean, std

    def prepared(self, batch):
        images, labels = batch
        return images.sub(self.mean).div(self.std), labels

    def __iter__(self):
        ahead = None
        for batch in self.loader:
            if ahead is not None:
                yield ahead
            ahead = self.prepared(batch)
        if ahead is not None:
            yield ahead


def main():
    torch.manual_seed(0)
    labels = torch.randint(4, (112,))
    images = 100 + 30 * torch.randn(112, 3, 6, 6) + 20 * labels[:, None, None, None]
    loader = DataLoader(TensorDataset(images, labels), 16, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = Prefetcher(loader, images.mean(), images.std())
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
        for _, (inputs, targets) in run.steps(60, batches):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)


if __name__ == "__main__":
    main()
