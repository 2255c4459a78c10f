"""A prefetcher that is one batch ahead, and is asked for each batch inside a loop over steps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge


class DataPrefetcher:
    def __init__(self, loader, mean, std):
        self.batches, self.mean, self.std = iter(loader), mean, std
        self.preload()

    def preload(self):
        try:
            self.next_inputs, self.next_targets = next(self.batches)
        except StopIteration:
            self.next_inputs, self.next_targets = None, None
            return
        self.next_inputs = self.next_inputs.sub(self.mean).div(self.std)

    def next(self):
        inputs, targets = self.next_inputs, self.next_targets
        if inputs is not None:
            self.preload()
        return inputs, targets


def main():
    torch.manual_seed(0)
    labels = torch.randint(4, (112,))
    images = 100 + 30 * torch.randn(112, 3, 6, 6) + 20 * labels[:, None, None, None]
    loader = DataLoader(TensorDataset(images, labels), 16, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    prefetcher = DataPrefetcher(loader, images.mean(), images.std())
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
        for _ in run.steps(60):
            inputs, targets = prefetcher.next()
            if inputs is None:
                prefetcher = DataPrefetcher(loader, images.mean(), images.std())
                inputs, targets = prefetcher.next()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)


if __name__ == "__main__":
    main()
