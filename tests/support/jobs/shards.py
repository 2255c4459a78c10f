"""Ranks that load what ranks have saved, perhaps more or fewer of them, and save it again.

`python shards.py <directory> <spec as JSON>`, with RANK, WORLD_SIZE and MASTER_ADDR in the
environment. `loaded_<rank>.json` says what was loaded: a digest of each whole tensor, the files
that were opened, and which checkpoints were passed over.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig, Verify
from forge.filesystem.files import write_atomically
from forge.group.collectives import enter_group
from forge.state import restoring
from forge.state.registry import StateRegistry

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size, wrap = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), spec["wrap"]
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
torch.manual_seed(spec.get("seed", 0))


class Net(nn.Module):
    """Sizes that no number divides, one row, a frozen layer, tied weights, and a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.also_tied = nn.Linear(7, 7, bias=False)
        self.also_tied.weight = self.tied.weight
        self.last = nn.Linear(7, 1)
        self.unused = nn.Linear(3, 11)
        self.constant = nn.Parameter(torch.zeros(9), requires_grad=False)  # shards of equal bits

    def forward(self, x):
        x = self.frozen(self.norm(self.inner(x)))
        return self.last(self.also_tied(torch.relu(self.tied(x))))


def sharded(net):
    """As the spec says: by rows, by columns, in two replicas, or not at all."""
    if wrap == "plain":
        return net
    shape = (2, size // 2) if wrap == "replicas" else (size,)
    names = ("replica", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if wrap == "columns":  # FSDP2 has them of even sizes only
        made = {
            p: nn.Parameter(distribute_tensor(p, mesh, [Shard(p.dim() - 1)]), p.requires_grad)
            for p in net.parameters()
        }
        for module in net.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, made[p])
        return net
    fully_shard(net.inner, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def part(value):
    return value.to_local() if hasattr(value, "to_local") else value


def digests(model, optimizer):
    """Of each tensor of all ranks together, by its name; without what each rank has by itself."""
    buffers = dict(model.named_buffers())  # each rank has its own
    found = {name: value for name, value in model.state_dict().items() if name not in buffers}
    names = [name for name, _ in model.named_parameters()]
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{names[number]} {key}": value for key, value in state.items()}
    grads = {f"{n} grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {
        name: hashlib.sha256(repr((whole(v).tolist(), v.dtype, v.shape)).encode()).hexdigest()
        for name, v in (found | grads).items()
    }


model = sharded(Net())
kinds = {
    "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
    "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
}
optimizer = kinds[spec.get("optimizer", "AdamW")]()
live = StateRegistry({"model": model, "optimizer": optimizer})
config = CheckpointConfig(verify=Verify[spec.get("verify", "full")])
group, opened = enter_group(lambda: directory / ".forge"), []
if group.rank == 0:
    store = Store(directory / "checkpoints", config, ranks=group, personal=("own",))
dist.barrier()
if group.rank:
    store = Store(directory / "checkpoints", config, ranks=group, personal=("own",))
sys.addaudithook(lambda kind, given: opened.append(str(given[0])) if kind == "open" else None)
found = store.newest(offer=lambda state: restoring.in_place_targets(live, state["live"]))
told = {"step": None}
if found is not None:
    read = found.state["live"]["states"]["model"]
    is_in_place = all(
        part(read[name]).data_ptr() == part(p).data_ptr()
        for name, p in model.named_parameters()
        if not name.startswith("norm.")  # which has a loading of its own
    )
    restoring.load(live, found.state["live"], found.fill())
    files = sorted({Path(name).name for name in opened if found.path.name in name})
    told = {
        "step": found.manifest.step,
        "own": found.state["own"].tolist(),
        "buffers": {name: one.tolist() for name, one in model.named_buffers()},
        "opened": [name for name in files if name.endswith(".safetensors")],
        "passed_over": store.passed_over,
        "is_in_place": is_in_place,
    }
torch.manual_seed(rank)
for _ in range(spec.get("steps", 0)):
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
if "save" in spec:
    state = {"step": spec["save"], "live": live.capture(), "own": torch.full((3,), float(rank))}
    snapshot = store.snapshot(spec["save"], state, copy=False)
    told["compared"] = sorted(snapshot.digests())
    store.commit(snapshot)
write_atomically(
    directory / f"loaded_{rank}.json", json.dumps(told | {"all": digests(model, optimizer)})
)
store.close()
group.close(30)
dist.destroy_process_group()
