"""Train a small encoder by momentum contrast on noisy views of synthetic vectors."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import forge

STEPS, BATCH, QUEUE, MOMENTUM, TEMPERATURE = 60, 32, 256, 0.99, 0.2


def view(x):
    return x + 0.3 * torch.randn_like(x)


def main():
    torch.manual_seed(0)
    data = torch.randn(16, 32).repeat(32, 1) + 0.2 * torch.randn(512, 32)
    loader = DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=True, drop_last=True)
    query = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    key = copy.deepcopy(query).requires_grad_(False)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)
    objects = {"model": query, "key": key, "optimizer": optimizer}
    with forge.Run({"checkpoint": {"every_steps": 10}}, **objects) as run:
        run.state["queue"] = F.normalize(torch.randn(QUEUE, 16), dim=1)
        run.state["pointer"] = 0
        for _, (x,) in run.steps(STEPS, loader):
            with torch.no_grad():
                for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                    slow.mul_(MOMENTUM).add_(fast, alpha=1 - MOMENTUM)
                k = F.normalize(key(view(x)), dim=1)
            q = F.normalize(query(view(x)), dim=1)
            queue, pointer = run.state["queue"], run.state["pointer"]
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1)
            loss = F.cross_entropy(logits / TEMPERATURE, torch.zeros(len(x), dtype=torch.long))
            loss.backward()
            run.update(loss, optimizer)
            queue[pointer : pointer + BATCH] = k
            run.state["pointer"] = (pointer + BATCH) % QUEUE
            run.log(loss=loss)
    with torch.no_grad():
        print(f"spread of the embeddings {F.normalize(query(data), dim=1).std(0).mean():.4f}")


if __name__ == "__main__":
    main()
