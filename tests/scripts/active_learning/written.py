"""Active learning: a loop for each round in one run, and the choice of samples between them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import forge

ROUNDS, STEPS = 4, 15


@torch.no_grad()
def most_uncertain(model, data, pool, count):
    model.eval()
    probabilities = model(data.tensors[0][pool]).softmax(1)
    model.train()
    entropy = -(probabilities * probabilities.log()).sum(1)
    return [pool[i] for i in entropy.topk(count).indices.tolist()]


def main():
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long())
    labelled = torch.randperm(len(data))[:40].tolist()
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
        for number in range(ROUNDS):
            loader = DataLoader(Subset(data, labelled), 10, shuffle=True)
            for _, (inputs, labels) in run.steps(STEPS * (number + 1), loader):
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
            pool = sorted(set(range(len(data))) - set(labelled))
            labelled = labelled + most_uncertain(model, data, pool, 20)
    print(f"{len(labelled)} samples are labelled")


if __name__ == "__main__":
    main()
