"""An image classifier: DataLoader with workers, random crops and flips made to resume, mixup."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import forge


class Images(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(4, (64,), generator=generator)
        self.images = torch.randn(64, 3, 10, 10, generator=generator)
        self.images += self.labels[:, None, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        top, left = torch.randint(3, (2,)).tolist()
        image = self.images[i, :, top : top + 8, left : left + 8]
        return image.flip(2) if torch.rand(()) < 0.5 else image, self.labels[i]


def mixup(samples):
    images, labels = (torch.stack(one) for one in zip(*samples, strict=True))
    share = torch.rand(())
    targets = F.one_hot(labels, 4).float()
    return share * images + (1 - share) * images.flip(0), share * targets + (
        1 - share
    ) * targets.flip(0)


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        forge.data.seeded(Images(), 0), 8, shuffle=True, num_workers=2, collate_fn=mixup
    )
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24)
    policy = {"checkpoint": {"every_steps": 5}}
    with forge.Run(policy, model=model, optimizer=optimizer, schedule=schedule) as run:
        for _, (images, targets) in run.steps(24, loader):
            loss = F.cross_entropy(model(images), targets, label_smoothing=0.1)
            loss.backward()
            run.update(loss, optimizer, schedule)
            run.log(loss=loss)


if __name__ == "__main__":
    main()
