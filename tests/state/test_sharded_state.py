"""Sharded state that forge refuses, and metadata in files that it ignores."""

import sys

import warm

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from forge.checkpoint.store import Store
from forge.checkpoint.format.encoding import Encoder
from forge.errors import CheckpointError, ForgeError
from forge.state import module_state
from forge.state.registry import StateRegistry
from forge.state.run_state import RunState
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater
from forge.config.schema import NanConfig

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
ones = torch.ones(4, 2)

class Odd(DTensor):
    pass

def of(placement, part=ones):
    return DTensor.from_local(part, mesh, [placement], run_check=False)

def tried(what):
    try:
        what()
    except ForgeError as error:
        print(error)
    else:
        print("accepted")

odd = of(Replicate())
odd.__class__ = Odd
for state in (
    {"weights": [of(Partial())]},
    {"tiles": of(_StridedShard(0, split_factor=1))},
    {"turned": of(Shard(0), ones.T)},
    {"odd": odd},
    {"uneven": DTensor.from_local(ones, mesh, [Shard(0)], shape=(9, 2), stride=(2, 1))},
    {"jagged": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)},  # imports as much
    {"good": [of(Shard(0)), of(Replicate()), torch.nn.Parameter(of(Shard(1)))]},
):
    tried(lambda: Store.check_savable(state))

shard = of(Shard(0))
encoder = Encoder()
encoder.encode({"whole": shard, "tied": shard, "part of this rank": shard.to_local()})
print(*encoder.tensors, sep=", ")

def keep():
    RunState()["best"] = [of(Shard(0))]

tried(keep)
model = fully_shard(torch.nn.Linear(2, 1), mesh=mesh)
live = StateRegistry({"model": model})
model.set_requires_gradient_sync(False)
model(ones).sum().backward()
tried(live.capture)
model.set_requires_gradient_sync(True)
model(ones).sum().backward()
tried(live.capture)
old = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
tried(lambda: module_state.check_kind("model.0", old))
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
live = StateRegistry({"model": model, "optimizer": optimizer, "scaler": scaler})
updater = Updater(live, NanPolicy(NanConfig()), is_enabled=True)
tried(lambda: updater.update(0.0, optimizer, None, scaler, None))
dist.destroy_process_group()
"""

FOUND = [
    "weights[0]: this version of forge cannot save a DTensor with the placement Partial (supported",
    "tiles: this version of forge cannot save a DTensor with the placement _StridedShard (",
    "turned: this version of forge cannot save a DTensor whose local tensor is not contiguous",
    "odd: this version of forge cannot save a tensor of the subclass Odd",
    "uneven: this version of forge cannot save a DTensor whose local shape, [4, 2], does not match"
    " its placements",
    "jagged: this version of forge cannot save a tensor of the subclass NestedTensor",
    "accepted",
    "whole, part of this rank",
    "run.state.best[0]: run.state has a DTensor, and forge cannot shard it again",
    "model: at the end of a step it still has gradients from a backward pass under",
    "accepted",
    "model.0: FullyShardedDataParallel (FSDP1) cannot be saved",
    "run.update(scaler=…): a GradScaler does not support sharded parameters",
]


def test_what_cannot_be_kept_of_sharded_state_is_refused_by_its_name(tmp_path):
    """Each would be silently wrong: a sum that is not reduced yet, tiles, hidden gradients."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "rendezvous")]
    with warm.Popen(command, imports=warm.SHARDING, stdout=-1, stderr=-2, text=True) as process:
        lines = process.communicate(timeout=120)[0].splitlines()
    assert len(lines) == len(FOUND), lines
    assert [a for a, b in zip(lines, FOUND, strict=True) if not a.startswith(b)] == []
