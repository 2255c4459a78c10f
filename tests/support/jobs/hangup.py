"""A job that prints in every step, until it is stopped: python hangup.py <dir> '{"steps": …}'.

Each print is made before or after the update, as `prints` says.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import forge
from forge.filesystem.files import write_atomically

directory = Path(sys.argv[1])
spec = {"prints": "after", "steps": 10**6} | json.loads(sys.argv[2])
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = {"dir": str(directory / "checkpoints"), "every_steps": 2, "every_s": None}
with forge.Run({"checkpoint": checkpoint}, model=model, optimizer=optimizer) as run:
    for step in run.steps(spec["steps"]):
        time.sleep(0.03)  # a step that is worth being repeated
        if spec["prints"] == "before":
            print("step", step, flush=True)
        loss = model(torch.randn(3, 4)).sum()
        loss.backward()
        run.update(loss, optimizer)
        if spec["prints"] == "after":
            print("step", step, flush=True)
        if step == 4:
            write_atomically(directory / "ready", str(os.getpid()))
