"""Ranks that agree on one stop, without forge.Run: `python agreeing.py <directory> <spec as JSON>`.

Prints the boundary at which it stopped, and what it has gathered from all ranks.
"""

import json
import os
import random
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from forge.errors import Reason
from forge.group.ranks import StoreCoordinator
from forge.group.requests import SaveRequest, StopRequest

spec = json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
if "slow_s" in spec:  # like a distant store, or a busy processor
    send = StoreCoordinator._send

    def send_late(self, client):
        def compare_set(*args):
            time.sleep(spec["slow_s"])
            return client.compare_set(*args)

        send(self, SimpleNamespace(compare_set=compare_set))

    StoreCoordinator._send = send_late
group = StoreCoordinator()
skew, value = random.Random(100 * spec["seed"] + rank), torch.zeros(4)
saves = []
for boundary in range(spec.get("boundaries", 10**6)):
    agreed = group.agreed(boundary)
    if agreed.save is not None and agreed.save not in saves:
        saves.append(agreed.save)
    if agreed.stop is not None:
        break
    is_saved = agreed.save is not None and agreed.save.step == spec.get("stop_after_save")
    if [rank, boundary] in spec["stops"] or (is_saved and rank == 0):
        group.propose(StopRequest(75, Reason.requested, "SIGUSR1"))
    if [rank, boundary] in spec.get("saves", []):
        group.propose(SaveRequest(boundary))
    time.sleep(skew.random() * spec.get("skew_s", 0.004))  # steps take different times
    if spec["has_collective"]:
        dist.all_reduce(value)
said = [boundary, [one.step for one in saves]]
found = [json.loads(one) for one in group.gather("found", json.dumps(said).encode(), 60)]
print(json.dumps(found), flush=True)
group.close(30)
dist.destroy_process_group()
