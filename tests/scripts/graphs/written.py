"""Nodes of a random graph, whose neighbours are sampled by a generator of the sampler's own."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import forge

NUM_NODES, NUM_CLASSES = 120, 3


class NeighbourSampler:
    def __init__(self, adjacency, fanout):
        self.adjacency, self.fanout = adjacency, fanout
        self.rng = torch.Generator().manual_seed(12)

    def __call__(self, nodes):
        nodes = torch.tensor(nodes)
        drawn = torch.multinomial(
            self.adjacency[nodes], self.fanout, replacement=True, generator=self.rng
        )
        return nodes, drawn


class Sage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.others = nn.Linear(8, width), nn.Linear(8, width)
        self.out = nn.Linear(width, NUM_CLASSES)

    def forward(self, x, nodes, neighbours):
        hidden = F.relu(self.own(x[nodes]) + self.others(x[neighbours].mean(1)))
        return self.out(F.dropout(hidden, 0.2, self.training))


torch.manual_seed(0)
labels = torch.arange(NUM_NODES) % NUM_CLASSES
share = torch.where(labels[:, None] == labels, 0.15, 0.03)
adjacency = torch.bernoulli(share).triu(1)
adjacency = adjacency + adjacency.T + torch.eye(NUM_NODES)
x = torch.randn(NUM_NODES, 8)
x[:, :NUM_CLASSES] += 0.5 * F.one_hot(labels)
sampler = NeighbourSampler(adjacency, fanout=5)
loader = DataLoader(range(NUM_NODES), 10, shuffle=True, collate_fn=sampler)
model = Sage(16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
    for _, (nodes, neighbours) in run.steps(60, loader):
        loss = F.cross_entropy(model(x, nodes, neighbours), labels[nodes])
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
