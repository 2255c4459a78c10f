"""What two ranks decide where something is true of one of them alone, in one case after the other.

`python alike.py <directory> <spec as JSON>`, with RANK and WORLD_SIZE in the environment;
`told_<rank>.json` has, by case, what each update did and what is left of it.
"""

import contextlib
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from forge import messages
from forge.config.schema import NanAction, NanConfig
from forge.filesystem.files import write_atomically
from forge.state.registry import StateRegistry
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.norms import whole
from forge.training.nan.update import Updater

torch.set_num_threads(1)
directory, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
messages.warn = lambda *_: None
mesh = init_device_mesh("cpu", (size,))
IS_STRUCK = rank == 1
NUM_STEPS = 16
"""As many bad ones as it takes a scale to fall by more than is explained by it."""


class Net(nn.Module):
    """One of its layers is used by a rank that is asked to, one is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1)
        self.seldom = nn.Linear(4, 1)

    def forward(self, x, uses_all):
        x = self.frozen(self.first(x))
        return self.last(x) + self.seldom(x) if uses_all else self.last(x)


def wrapped(net, wrap):
    match wrap:
        case "fsdp2":
            return fully_shard(net, mesh=mesh)
        case "plain":
            return net
    model = DistributedDataParallel(net, find_unused_parameters="unused" in wrap)
    if "hook" in wrap:  # gradients stay each rank's own

        def left_alone(_, bucket):
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, left_alone)
    return model


def planted(parameter, value):
    """A fault of this device, after whatever has brought the gradients together."""
    grad = parameter.grad
    (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = value


happened = []
real_all_reduce, real_clip = dist.all_reduce, nn.utils.clip_grads_with_norm_


class Awaited:
    def __init__(self, work):
        self.work = work
        self.is_completed = work.is_completed

    def wait(self):
        happened.append("waited")
        return self.work.wait()


def noted_all_reduce(tensor, **options):
    is_async = options.get("async_op", False)
    happened.append("begun" if is_async else "blocking")
    work = real_all_reduce(tensor, **options)
    return Awaited(work) if is_async else work


def noted_clip(*args, **options):
    happened.append("clipped")
    return real_clip(*args, **options)


def case(wrap, fact, *, clip_norm=None, scaled=False, form="update", optimizers=1, **nan):
    """What the updates of one training did, and what it has then."""
    torch.manual_seed(0)
    nan["action"] = NanAction[nan.get("action", "skip")]
    model = wrapped(Net(), wrap)
    trained = [p for p in model.parameters() if p.requires_grad]
    halves = [trained[:2], trained[2:]] if optimizers == 2 else [trained]
    steppers = [torch.optim.SGD(half, lr=0.01) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24) if scaled else None
    policy = NanPolicy(NanConfig(max_consecutive=3, **nan))
    objects = {"model": model, "scaler": scaler}
    objects |= {f"optimizer{n}": one for n, one in enumerate(steppers)}
    live = StateRegistry({name: one for name, one in objects.items() if one is not None})
    updater, updated = Updater(live, policy, is_enabled=True), []
    for one in steppers:
        one.register_step_pre_hook(lambda *_: happened.append("stepped"))
    for step in range(NUM_STEPS):
        is_bad = IS_STRUCK and fact != "nothing" and (step == 2 or step > 4)
        uses_all = wrap == "fsdp2" or (fact != "unused" and "unused" not in wrap) or is_bad
        x = torch.arange(8.0).reshape(2, 4).cos() * (1 + 0.1 * rank)
        if is_bad and fact in ("input", "unused"):
            x = x * math.nan
        is_alone = fact == "no_sync" and wrap == "ddp"
        with model.no_sync() if is_alone else contextlib.nullcontext():
            loss = model(x, uses_all).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if is_bad and fact == "loss":
            loss = loss * math.nan
        if is_bad and fact in ("gradient", "no_sync", "huge"):
            planted(model.get_parameter(NAMES[wrap]), 1e30 if fact == "huge" else math.inf)
        updater.on_step(step)
        happened.clear()
        if form == "update":
            given = steppers if optimizers == 2 else steppers[0]
            updated.append(updater.update(loss, given, None, scaler, clip_norm))
        else:
            if form == "guard, unscaled":
                scaler.unscale_(steppers[0])
            updated.append(updater.should_step(loss))
            for one in steppers:
                if updated[-1]:
                    one.step() if scaler is None else scaler.step(one)
                one.zero_grad()
            if scaler is not None and (updated[-1] or form == "guard, unscaled"):
                scaler.update()
        updater.settle()
        if step == 0:
            order = list(happened)
    return {
        "updated": updated,
        "total": policy.total,
        "wants": type(policy.wants).__name__,
        "overflows": updater.state_dict()["overflows"]["total"],
        "scale": scaler.get_scale() if scaled else None,
        "weights": [whole(p.detach()).tolist() for p in model.parameters()],
        "order": order,
    }


NAMES = {"plain": "first.weight", "fsdp2": "first.weight"}
NAMES |= {wrap: "module.first.weight" for wrap in ("ddp", "ddp, hook", "ddp, unused")}
dist.all_reduce, nn.utils.clip_grads_with_norm_ = noted_all_reduce, noted_clip
told = {}
for name, (wrap, fact, options) in json.loads(sys.argv[2])["cases"].items():
    told[name] = case(wrap, fact, **options)
write_atomically(directory / f"told_{rank}.json", json.dumps(told))
dist.destroy_process_group()
