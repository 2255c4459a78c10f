"""A training on several ranks with events, each once over all attempts.

`python struck.py <directory> <spec as JSON>`; an event is [where, step, rank, what], with rank -1
for all ranks. `where` is a point of the script (`step`, `function`, `pass`, `batch`), or a method
that forge calls on a saved object (`state`, `load`).
"""

import atexit
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import forge
import forge.group.ranks
import forge.training.attempt
import forge.training.run_end
from forge.checkpoint.fence import TOKEN_FILE

torch.set_num_threads(1)
directory, spec = Path(sys.argv[1]), json.loads(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size
)
WIDTH, N = 8, spec.get("n", 16)
step = 0


def happening(where):
    """The events of this point that have not happened yet; marks them as done."""
    for number, (place, at, who, what) in enumerate(spec.get("events", [])):
        mark = directory / f"happened_{number}_{rank}"
        if (place, at, who) in ((where, step, rank), (where, step, -1)) and not mark.exists():
            mark.touch()
            yield what


def refused(*args, **given):
    """Raise the error of a directory without write permission."""
    raise PermissionError(13, "Permission denied")


def act(where):
    for what in happening(where):
        match what:
            case "exit":
                os._exit(3)
            case "exception":
                raise RuntimeError("planted")
            case "save":
                run.save()
            case "finish":
                run.finish("enough")
            case "full":  # from now on no file can grow, as on a full disk
                limit(8 << 10)
            case "unhealthy":  # no file can be created on the rank's node
                os.environ["LOCAL_RANK"] = "0"
                tempfile.NamedTemporaryFile = refused
            case "room":
                limit(resource.RLIM_INFINITY)
            case "stays out":  # enters no Run; exits after the other ranks
                while not all(
                    (directory / f"left_{one}").exists() for one in {*range(size)} - {rank}
                ):
                    time.sleep(0.01)
                sys.exit(0)
            case "clock":  # the job has five seconds left, too few for a stop
                os.environ["FORGE_END_TIME"] = str(time.time() + 5)
            case "taken":  # by a newer attempt
                token = directory / "checkpoints" / TOKEN_FILE
                token.write_text(json.dumps(json.loads(token.read_text()) | {"token": "another"}))
            case _ if what.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, what))


def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class Asked:
    """An object in the checkpoint, whose methods run events on every rank."""

    def state_dict(self):
        act("state")
        return {"own": torch.full((4096,), float(rank))}  # a long file, for each rank

    def load_state_dict(self, state):
        act("load")


class Numbers(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        act("batch")
        x = torch.linspace(0, 1 + index, WIDTH).sin()
        if index in spec.get("poison", []):
            x = x * math.nan
        return x, x.sum().reshape(1)


torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2), torch.nn.Linear(WIDTH, 1)
)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
loader = DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), seed=3))
policy = {"checkpoint": {"dir": str(directory / "checkpoints"), **spec.get("checkpoint", {})}}
policy |= spec.get("policy", {})
evaluated = torch.zeros(1)
forge.group.ranks.START_S = forge.training.attempt.START_S = spec.get("start_s", 300)
forge.training.run_end._ALL_S = spec.get("all_s", 300)
act("start")
if "start_s" in spec:
    atexit.register((directory / f"left_{rank}").touch)


def train(inputs, targets):
    global step
    step = run.step
    act("step")
    time.sleep(spec.get("pause_s", 0.0))  # it takes a moment until ranks agree on a proposal
    loss = (model(inputs) - targets).square().mean()
    kinds = list(happening("loss"))
    # These happen whenever the step is done, and not just once.
    kinds += [what for at, who, what in spec.get("always", []) if [at, who] == [step, rank]]
    if "nan" in kinds:
        loss = loss * math.nan
    loss.backward()
    if "nan gradient" in kinds:
        next(model.parameters()).grad[0, 0] = math.nan
    run.update(loss, optimizer, clip_norm=1.0)
    if rank == 0 or not spec.get("only_first_logs"):
        run.log(loss=loss, first=inputs[0, -1])


with forge.Run(policy, model=model, optimizer=optimizer, asked=Asked()) as run:

    @run.every(spec.get("every", 5))
    def held_out(done):
        global step
        step = done
        act("function")
        if spec.get("has_collective"):
            dist.all_reduce(evaluated)

    if "epochs" in spec:
        for epoch in run.epochs(spec["epochs"]):
            loader.sampler.set_epoch(epoch)
            for _, (inputs, targets) in run.batches(loader):
                train(inputs, targets)
            step = epoch
            act("pass")
    else:
        for _, (inputs, targets) in run.steps(N, loader):
            train(inputs, targets)
    act("outside")
    steps = run.step
torch.save({**model.state_dict(), "steps": torch.tensor(steps)}, directory / f"weights_{rank}.pt")
dist.destroy_process_group()
