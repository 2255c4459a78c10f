"""Two ranks that differ as their environments say: policy, config, arguments, torch, script.

`python differing.py <directory> <spec as JSON>`; the ranks meet by a file.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import forge
from forge.group.ranks import StoreCoordinator

torch.set_num_threads(1)
directory = Path(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
mine = json.loads(os.environ.get("MINE", "{}"))
place = directory / mine.get("cwd", ".")
place.mkdir(exist_ok=True)
os.chdir(place)
sys.argv[2:] = mine.get("words", [])
torch.__version__ = mine.get("torch", torch.__version__)
if "script" in mine:
    (directory / "script.py").write_text(mine["script"])
    sys.modules["__main__"].__file__ = str(directory / "script.py")
if "slow_after" in mine:  # the system lets this rank wait, before it notices what is wrong
    gather = StoreCoordinator.gather

    def slowly(self, key, *rest):
        found = gather(self, key, *rest)
        if key.startswith(mine["slow_after"]):
            time.sleep(4)
        return found

    StoreCoordinator.gather = slowly
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saves = {"dir": "checkpoints", "every_steps": mine.get("every_steps")}
policy = {"checkpoint": saves} | mine.get("policy", {})
known = {"config": mine["config"]} if "config" in mine else {}
with forge.Run(policy, model=model, optimizer=optimizer, **known) as run:
    for step in run.steps(4):
        loss = model(torch.ones(1, 2)).sum()
        loss = loss * float("nan") if step == 2 else loss
        loss.backward()
        run.update(loss, optimizer)
dist.destroy_process_group()
