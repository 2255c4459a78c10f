"""A training on several ranks: DDP with many buckets, and data from a DistributedSampler.

`python ranks.py <directory> <spec as JSON>`, with RANK, WORLD_SIZE and MASTER_ADDR in the
environment; the rendezvous uses a file.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import forge

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
torch.manual_seed(7)
WIDTH = 24


class Net(torch.nn.Module):
    """A model whose layers run in another order than they were built, so DDP rebuilds buckets."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(WIDTH, 1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        norm = torch.nn.BatchNorm1d if spec.get("norm", True) else torch.nn.LayerNorm
        self.norm = norm(WIDTH)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(self.dropout(self.norm(x)))


def marked(name, step):
    """Whether the spec has this event at this step of this rank; True once over all attempts."""
    mark = directory / f"{name}_{rank}_{step}"
    asked = [step, rank] in spec.get(name, []) or [step, -1] in spec.get(name, [])
    if asked and not mark.exists():
        mark.touch()
        return True
    return False


def in_step(step):
    """Let a rank that is to fail in a step wait until all ranks have begun the step."""
    if spec.get("together"):
        (directory / f"begun_{rank}_{step}").touch()
        dies = [step, rank] in [*spec.get("signal", []), *spec.get("exception", [])]
        while dies and not all((directory / f"begun_{r}_{step}").exists() for r in range(size)):
            time.sleep(0.002)


def wrapped(net):
    """The model in DDP, sharded by FSDP2, or unchanged, depending on the spec."""
    if spec.get("wrap") == "plain":
        return net
    if spec.get("wrap") != "fsdp2":
        return DistributedDataParallel(net, bucket_cap_mb=0.002)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(value):
    """The full tensor, if it is sharded."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


model = wrapped(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(96, WIDTH)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
torch.manual_seed(100 + rank)  # each rank has its own dropout masks
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
policy = {"checkpoint": {"dir": str(directory / "checkpoints"), **spec.get("checkpoint", {})}}
seen = torch.zeros(96)

objects = {"model": model, "optimizer": optimizer}
if spec.get("pushed"):
    objects["loader"] = loader = forge.data.resumable(loader)


def steps(run, n):
    """The steps of `run.steps`, or of a loop that the script owns (`run.boundary`)."""
    if not spec.get("pushed"):
        yield from run.steps(n, loader)
        return
    start = run.begin()
    step = start.step
    while not start.is_finished and step < n:
        for batch in loader:
            yield step, batch
            step += 1
            run.boundary(step, taken=step)
            if step == n:
                break
    run.end_loop()


with forge.Run(policy | spec.get("policy", {}), **objects) as run:

    @run.every(spec.get("eval_every", 5))
    def held_out(step):
        model.eval()
        with torch.no_grad():
            run.log(held_out=getattr(model, "module", model)(x).square().mean())
        model.train()
        if [step, rank] in spec.get("finish", []):
            run.finish("enough")
        if marked("unfinished", step):
            threading.Event().wait()

    if "large" in spec:
        run.state["seen"] = torch.zeros(20_000)
    for step, (inputs, targets) in steps(
        run, spec.get("n_by_rank", {}).get(str(rank), spec.get("n", 40))
    ):
        for group in optimizer.param_groups if "rate" in spec else []:
            group["lr"] *= spec["rate"]
        in_step(step)
        if marked("signal", step):
            os.kill(os.getpid(), getattr(signal, spec.get("how", "SIGUSR1")))
        if marked("exception", step):
            raise RuntimeError("planted")
        time.sleep(spec.get("pause_s", 0.0))
        if marked("stuck", step):
            threading.Event().wait()
        loss = (model(inputs) - targets).square().mean()
        if [step, rank] in spec.get("nan", []) or marked("nan_once", step):
            loss = loss * float("nan")
        loss.backward()
        if marked("late", step):
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        run.update(loss, optimizer, clip_norm=1.0)
        run.log(loss=loss)
    steps = run.step
    if "folds" in spec:
        if marked("signal_after", steps):
            os.kill(os.getpid(), getattr(signal, spec["how"]))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
weights = {name: whole(value) for name, value in model.state_dict().items()}
torch.save({**weights, "steps": torch.tensor(steps)}, directory / f"weights_{rank}.pt")
dist.destroy_process_group()
