"""What forge adds to each step of a tiny model with Trainer or Accelerate, in microseconds of CPU.

    python benchmarks/transformers_step.py [--steps N] [--rounds N]

As `step.py`: each loop is a process of its own, they take turns, and medians are printed. The
packages are those of `make test`, or installed ones.

    Trainer            a step without accumulation, that logs nothing
    ForgeTrainer       the same, with signals, saves, the NaN policy and the place in the data
    Accelerate         a loop with backward, optimizer.step and zero_grad
    Accelerate, forge  the same in `forge.integrations.accelerate.AcceleratedRun`
"""

from __future__ import annotations

from step import compare

_TRAINING = """
import os, sys, time
sys.path.append(os.path.join(sys.prefix, "frameworks", "site-packages"))
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
kind, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
policy = {"checkpoint": {"dir": folder + "/checkpoints"}}
calls = 0

def wait():
    # CPU seconds of the steps since the last turn, then until the next turn.
    global began
    print("CPU", time.process_time() - began, flush=True)
    sys.stdin.readline() or os._exit(0)
    began = time.process_time()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, x=None):
        global calls
        if calls % count == 0:
            wait()
        calls += 1
        return {"loss": self.layers(x).square().mean()}

began = time.process_time()
model, data = Model(), [{"x": one} for one in torch.randn(64 * 500, 16)]
if "Trainer" in kind:
    from transformers import Trainer, TrainingArguments
    given = {}
    if kind == "ForgeTrainer":
        from forge.integrations.transformers import ForgeTrainer as Trainer
        given = {"policy": policy}
    arguments = TrainingArguments(
        folder, max_steps=10**8, per_device_train_batch_size=64, learning_rate=1e-6,
        save_strategy="no", logging_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(model, arguments, train_dataset=data, **given).train()
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(data, 64, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def step(batch):
    loss = model(**batch)["loss"]
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()

if kind == "Accelerate, forge":
    import forge.integrations.accelerate
    with forge.integrations.accelerate.AcceleratedRun(policy, accelerator) as run:
        for _, batch in run.steps(10**8, loader):
            step(batch)
while True:
    for batch in loader:
        step(batch)
"""

BESIDE = {
    "Trainer": None,
    "ForgeTrainer": "Trainer",
    "Accelerate": None,
    "Accelerate, forge": "Accelerate",
}
"""Each loop, and the one that it is compared with."""


if __name__ == "__main__":
    compare(__doc__, _TRAINING, BESIDE, 200)
