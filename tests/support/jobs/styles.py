"""What people train with on several ranks: `python styles.py <directory> <spec as JSON>`.

`styles` names what is used at once; `events` are [step, rank, signal], each sent once over all
attempts, in the middle of a step.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import forge

if {"recomputed", "compiled", "compiled inside"} & {*json.loads(sys.argv[2])["styles"]}:
    import torch._prims  # comes too late where `quick` puts off torch._dynamo

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
styles = set(spec["styles"])
WIDTH, EVERY = 16, 3


class Net(torch.nn.Module):
    """Used in another order than it was built in; its branch is not used in every step."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(WIDTH, 1)
        self.branch = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.2)

    def block(self, x, layer):
        return self.dropout(torch.relu(layer(x)))

    def forward(self, x, has_branch=True):
        for layer in self.layers:
            if "recomputed" in styles:
                x = checkpoint(self.block, x, layer, use_reentrant=False)
            else:
                x = self.block(x, layer)
        return self.last(x + self.branch(x) if has_branch else x)


def strike(step):
    for number, (at, who, name) in enumerate(spec.get("events", [])):
        mark = directory / f"struck_{number}"
        if (at, who) == (step, rank) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), getattr(signal, name))


torch.manual_seed(7)
net = Net()
if "frozen" in styles:
    net.layers[0].requires_grad_(False)
if "compiled inside" in styles:
    net.compile(backend="eager")
model = ddp = DistributedDataParallel(
    net,
    bucket_cap_mb=1
    if {"compiled", "compiled inside"} & styles
    else 0.001,  # or the compiler refuses it
    find_unused_parameters="unused" in styles,
    gradient_as_bucket_view="views" in styles,
    static_graph="static" in styles,
)
if "compiled" in styles:
    model = torch.compile(ddp, backend="eager")
given = {"model": model}
trained = [p for p in model.parameters() if p.requires_grad]
halves = [trained[::2], trained[1::2]] if "two" in styles else [trained]
optimizers = [torch.optim.AdamW(one, lr=1e-2) for one in halves]
given["optimizers"] = optimizers
schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 4)
given["schedule"] = schedule
scaler = None
if "scaler" in styles:
    scaler = given["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
if "average" in styles:
    average = given["average"] = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
x = torch.randn(96, WIDTH)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
torch.manual_seed(100 + rank)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
policy = {"checkpoint": {"dir": str(directory / "checkpoints"), "every_steps": 4}}


def update(loss):
    if "guard" in styles:  # the update is the user's own
        if run.should_step(loss):
            for one in optimizers:
                one.step()
        for one in optimizers:
            one.zero_grad(set_to_none=False)
        return
    for number, one in enumerate(optimizers):
        run.update(loss, one, None if number else schedule, scaler=scaler)


with forge.Run(policy, **given) as run:
    for step, (inputs, targets) in run.steps(spec.get("n", 16), loader):
        is_last = "accumulated" not in styles or step % EVERY == EVERY - 1
        has_branch = not ("unused" in styles and rank == step % size)
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = (model(inputs, has_branch) - targets).square().mean()
            scaled = loss if scaler is None else scaler.scale(loss)
            if scaler is not None and step == 8 and rank == 1:
                scaled = scaled * 1e38 * 1e38  # overflows here, and for all by the sum
            scaled.backward()
        strike(step)
        time.sleep(spec.get("pause_s", 0.0))  # a signal takes a moment to be agreed on
        if is_last:
            update(loss)
            if "average" in styles:
                average.update_parameters(net)
        values = {} if scaler is None else {"scale": scaler.get_scale()}
        run.log(loss=loss, lr=schedule.get_last_lr()[0], **values)
weights = {"model." + key: one for key, one in net.state_dict().items()}
if "average" in styles:
    weights |= {"average." + key: one for key, one in average.state_dict().items()}
torch.save(weights, directory / f"weights_{rank}.pt")
dist.destroy_process_group()
