"""Trains with gradients rounded to half precision under a loss scale of its own, `scale.value`."""

import sys
from dataclasses import dataclass

import torch
from torch import nn

import forge


@dataclass(slots=True)
class LossScale:
    value: float = 4096.0

    def unscaled(self, parameters):
        """Divide the gradients; tell whether all of them were finite."""
        finite = True
        for p in parameters:
            p.grad = p.grad.half().float() / self.value
            finite = finite and bool(p.grad.isfinite().all())
        self.value *= 1.3 if finite else 0.25
        return finite


def main(fixed):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)
    scale = LossScale()
    with forge.Run({"checkpoint": {"every_steps": 10}}, model=model, optimizer=optimizer) as run:
        if fixed:
            scale.value = run.state.get("scale", scale.value)
        for _ in run.steps(50):
            x = torch.randn(16, 4)
            loss = (model(x) - x.abs().sum(1, keepdim=True)).square().mean()
            (loss * scale.value).backward()
            run.log(loss=loss)
            if scale.unscaled(model.parameters()):
                run.update(loss, optimizer)
            else:
                optimizer.zero_grad()
            if fixed:
                run.state["scale"] = scale.value


if __name__ == "__main__":
    main("--fixed" in sys.argv)
