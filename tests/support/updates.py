"""Small models and losses for `run.update`, and runs that leave no handler behind."""

import contextlib

import torch

import forge
from forge.shutdown import stopping

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def build(make_optimizer, depth=3, **options):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4, **options) for _ in range(depth)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 1, **options))
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
    return model, optimizer, schedule


def losses(model, steps):
    generator = torch.Generator().manual_seed(9)
    parameter = next(model.parameters())
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator).to(parameter.dtype)
        yield (model(x) - x.sum(1, keepdim=True)).square().mean()


@contextlib.contextmanager
def a_run(directory, policy=None, **stateful):
    """A run whose handlers are gone afterwards."""
    try:
        checkpoint = {"dir": str(directory), "every_steps": 1000, "every_s": None}
        with forge.Run({"checkpoint": checkpoint, **(policy or {})}, **stateful) as run:
            yield run
    finally:
        stopping.uninstall()
