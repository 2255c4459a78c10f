"""A training on several ranks whose evaluation is long, and another on each rank.

`python evaluating.py <directory> <spec as JSON>`: `spec["evaluates"]` says how each rank spends its
first evaluation at step 10, `spec["signal"]` which of them is signalled in it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import forge

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
torch.manual_seed(7)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
policy = {"checkpoint": {"dir": str(directory / "checkpoints"), "every_steps": None}}


def evaluate():
    """As the spec says, and once over all attempts."""
    mark = directory / f"evaluated_{rank}"
    how = spec.get("evaluates", ["at once"] * size)[rank]
    if mark.exists() or how == "at once":
        return
    mark.touch()
    while not all((directory / f"evaluated_{one}").exists() for one in spec["meets"]):
        time.sleep(0.01)  # a signal before all have come here would stop them elsewhere
    if spec["signal"] == rank:
        os.kill(os.getpid(), signal.SIGUSR1)
    while how == "polls":
        run.check_stop()
        time.sleep(0.01)
    if how == "stands":
        dist.all_reduce(torch.zeros(1))
    while how == "hears nothing" and not (directory / "checkpoints/step_10").exists():
        time.sleep(0.01)
    if how == "fails":
        while not run.is_stopping:
            time.sleep(0.01)
        raise RuntimeError("interrupted")


with forge.Run(policy, model=model, optimizer=optimizer) as run:

    @run.every(10)  # its first run: nobody knows how long it takes
    def held_out(step):
        torch.rand(3)  # of no consequence for what was held
        if step == 10:
            evaluate()

    for _step in run.steps(16):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss)
torch.save(model.state_dict(), directory / f"weights_{rank}.pt")
dist.destroy_process_group()
