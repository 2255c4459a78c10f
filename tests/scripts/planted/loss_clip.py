"""Trains with a clipping that follows the median loss, of which a default argument is `history`."""

import statistics
import sys

import torch
from torch import nn

import forge


def typical(value, history=[]):  # noqa: B006
    """The median of the last values, this one included."""
    history.append(value)
    del history[:-15]
    return statistics.median(history)


def main(fixed):
    torch.manual_seed(21)
    model = nn.LSTM(2, 12, batch_first=True)
    head = nn.Linear(12, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.3)
    kept = {"model": model, "head": head, "optimizer": optimizer}
    with forge.Run({"checkpoint": {"every_steps": 10}}, **kept) as run:
        for _ in run.steps(50):
            x = torch.randn(8, 6, 2)
            predicted = head(model(x)[0][:, -1])
            loss = (predicted - x.prod(2).sum(1, keepdim=True)).abs().mean()
            loss.backward()
            if fixed:
                size = typical(loss.item(), run.state.setdefault("history", []))
            else:
                size = typical(loss.item())
            run.update(loss, optimizer, clip_norm=0.02 * size)
            run.log(loss=loss)


if __name__ == "__main__":
    main("--fixed" in sys.argv)
