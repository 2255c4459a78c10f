"""Trains embeddings of items; the negatives come from a torch `generator` of their own."""

import functools
import sys

import torch
from torch import nn
from torch.nn import functional as F

import forge

NUM_ITEMS = 40

torch.manual_seed(3)
generator = torch.Generator().manual_seed(3)
draw = functools.partial(torch.randint, 0, NUM_ITEMS, generator=generator)
users = nn.Embedding(20, 8)
items = nn.Embedding(NUM_ITEMS, 8)
optimizer = torch.optim.Adagrad([*users.parameters(), *items.parameters()], lr=0.1)
kept = {"users": users, "items": items, "optimizer": optimizer}
if "--fixed" in sys.argv:
    kept["generator"] = generator

with forge.Run({"checkpoint": {"every_steps": 10}}, **kept) as run:

    @run.every(10, at_end=True)
    def margin(_):
        with torch.no_grad():
            run.log(spread=items.weight.std(), largest=users.weight.abs().max())

    for _ in run.steps(50):
        user = torch.randint(20, (32,))
        liked = (user * 7) % NUM_ITEMS
        other = draw((32,))
        u = users(user)
        loss = F.softplus((u * (items(other) - items(liked))).sum(1)).mean()
        loss.backward()
        run.update(loss, optimizer)
        run.log(loss=loss)
