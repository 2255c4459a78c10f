"""A training on several ranks that holds still in step 3: `attacked.py <directory> <spec as JSON>`.

No step has a collective. The ranks meet by a file, or as the environment says. `here_<rank>` says
that a rank has come there, and `go` lets all go on.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import forge

directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
if "MEETING" in os.environ:
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
    )
else:
    forge.distributed.init()
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
policy = {
    "checkpoint": {"dir": str(directory / "checkpoints"), "every_steps": None, "every_s": None},
    "shutdown": {"timeout_s": 60},
}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for step in run.steps(spec.get("n", 8)):
        if step == 3:
            (directory / f"here_{rank}").touch()
            while not (directory / "go").exists():
                time.sleep(0.002)
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
