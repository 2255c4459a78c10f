"""What `loops.py` and `generators.py` have in common: data, a model, and the signals to come."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import forge

POINTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(7))
VALUES = POINTS.sum(1, keepdim=True).sin()
DATA = TensorDataset(POINTS, VALUES)


class Bench:
    """What the loops have in common: a model, its optimizer, and the signals to come."""

    def __init__(self, directory, spec):
        checkpoints = directory / "checkpoints"
        self.directory, self.is_resumed = directory, checkpoints.exists()
        self.kill_at = {} if checkpoints.exists() else dict(spec.get("kill_at", {}))
        policy = spec.get("policy", {})
        checkpoint = {"dir": str(checkpoints)} | policy.get("checkpoint", {})
        self.policy = policy | {"checkpoint": checkpoint}
        self.spec = spec
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, 1),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def run(self, **more):
        return forge.Run(self.policy, model=self.model, optimizer=self.optimizer, **more)

    def reach(self, place):
        """The signal that was asked for at this place, if one was."""
        name = self.kill_at.pop(place, None)
        if name:
            os.kill(os.getpid(), signal.Signals["SIG" + name])

    def fold(self, run):
        """What people do after a loop: it changes the weights, draws, counts, and leaves a file."""
        self.reach("after")
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.5).add_(torch.randn_like(p) * 0.1)
        run.state["folds"] = run.state.get("folds", 0) + 1
        run.log(folded=self.evaluate())
        torch.save(self.model.state_dict(), self.directory / "folded.pt")
        self.reach("folded")

    def learn(self, run, x, y):
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        run.update(loss, self.optimizer)
        run.log(loss=loss)

    def evaluate(self):
        """Draws, as a generative model does."""
        self.model.eval()
        with torch.no_grad():
            total = self.model(torch.randn(4, 6)).sum().item()
        self.model.train()
        return total


def play(loops, directory, spec):
    """Run the loop that `spec` names and leave its weights."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    bench = Bench(directory, spec)
    {loop.__name__: loop for loop in loops}[spec["loop"]](bench)
    torch.save(bench.model.state_dict(), directory / "weights.pt")


def play_arguments(main):
    """The job of the command line."""
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
