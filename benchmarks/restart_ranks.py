"""SIGKILL of one of several ranks: seconds until all train again, and how many steps they repeat.

    python benchmarks/restart_ranks.py [--ranks N] [--rounds N] [--every N] [--kinds NAMES]

The same small DDP training, saved every so many steps, in three kinds of jobs that take turns:

    torch       torchrun --max-restarts; a careful script: torch.save of model, optimizer and random
                state to another name, fsync, rename; resumes from the newest
    forge       torchrun --max-restarts; the same loop in forge.Run
    launcher    the loop in forge.Run as a job of hydra/launcher=local with tasks_per_job

A rank, drawn by chance, kills itself after a step that is drawn, too. The clock runs from there to
the end of the first step of the last of all ranks; steps between it and the one they resume at are
repeated. All then have to finish. Printed are medians, and the extremes; and when the first script
of the new ranks was started, which the old ones' ends have to come before.

torch 2.13 keeps the store of an attempt for the next one, whose ranks may find each other's old
addresses in it and give up: torchrun is started with the variable that turns this off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

_TRAINING = """
import json, os, signal, sys, time
from pathlib import Path

began = time.time()
folder, num_steps, every = Path(sys.argv[0]).parent, NUM_STEPS, EVERY

def train(wrapped):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(7)
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(num_steps, dist.get_world_size(), 16, 256)
    notes = open(folder / f"notes_{rank}.jsonl", "a")

    def loss_of(step):
        time.sleep(0.01)
        struck = folder / "struck"
        if (rank, step) == STRIKE and not struck.exists():
            struck.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(data[step, rank]) - 1).square().mean()
        loss.backward()
        return loss

    def note(step):
        line = {"pid": os.getpid(), "step": step, "time": time.time(), "began": began}
        notes.write(json.dumps(line) + "\\n")
        notes.flush()

    wrapped(rank, model, optimizer, loss_of, note)
    dist.destroy_process_group()
"""

_TORCH = """
def by_hand(rank, model, optimizer, loss_of, note):
    import torch
    import torch.distributed as dist

    def step_of(path):
        return int(path.stem.partition("_")[2])

    first, saved = 0, sorted(folder.glob("step_*.pt"), key=step_of)
    if saved:
        state = torch.load(saved[-1], weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        first = state["step"]
    for step in range(first, num_steps):
        loss = loss_of(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(loss)
        optimizer.step()
        optimizer.zero_grad()
        note(step)
        if (step + 1) % every == 0:
            if rank == 0:
                path = folder / f"step_{step + 1}.pt"
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with open(folder / "new", "wb") as file:
                    torch.save({**state, "random": torch.get_rng_state(), "step": step + 1}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(folder / "new", path)
                fd = os.open(folder, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
            dist.barrier()

import torch.distributed
torch.distributed.init_process_group("gloo")
train(by_hand)
"""

_FORGE = """
def in_run(rank, model, optimizer, loss_of, note):
    import forge

    policy = {"checkpoint": {"dir": str(folder / "checkpoints"), "every_steps": every}}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(num_steps):
            loss = loss_of(step)
            run.update(loss, optimizer, clip_norm=1.0)
            note(step)
"""

_BY_TORCHRUN = """
import torch.distributed
torch.distributed.init_process_group("gloo")
train(in_run)
"""

_BY_HYDRA = """
import forge, hydra

@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg):
    forge.distributed.init()
    train(in_run)

if __name__ == "__main__":
    main()
"""


def torchrun(size: int) -> list[str]:
    """The command, from its module."""
    options = ["--standalone", f"--nproc-per-node={size}", "--max-restarts=3"]
    return ["-m", "torch.distributed.run", *options, "train.py"]


def launcher(size: int) -> list[str]:
    """A sweep of one job."""
    job = [f"hydra.launcher.tasks_per_job={size}", f"hydra.launcher.cpus_per_job={size}"]
    return ["train.py", "-m", "hydra/launcher=local", "hydra.launcher.progress=plain", *job]


KINDS: dict[str, tuple[str, Any]] = {
    "torch": (_TORCH, torchrun),
    "forge": (_FORGE + _BY_TORCHRUN, torchrun),
    "launcher": (_FORGE + _BY_HYDRA, launcher),
}


def restarted(kind: str, size: int, every: int, rng: random.Random) -> tuple[float, float, int]:
    """Seconds from the kill until a script starts, and until all train; and steps repeated."""
    strike = (rng.randrange(size), rng.randrange(every + every // 4, 2 * every))
    source, command = KINDS[kind]
    values = {"NUM_STEPS": 3 * every, "EVERY": every, "STRIKE": strike}
    text = _TRAINING + source
    for name, value in values.items():
        text = text.replace(name, str(value))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(text)
        (folder / "conf.yaml").write_text("defaults: [_self_, resilience: default]\n")
        path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "RES_OPTIONS": "timeout:1 attempts:1",  # see several.py
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(folder / "output.txt", "wb") as output:
            done = subprocess.run(
                [sys.executable, *command(size)],
                cwd=folder, env=env, stdout=output, stderr=output, check=False,
            )  # fmt: skip
        notes = [
            [json.loads(line) for line in (folder / f"notes_{rank}.jsonl").read_text().splitlines()]
            for rank in range(size)
            if (folder / f"notes_{rank}.jsonl").exists()
        ]
        ends = [rank[-1]["step"] for rank in notes]
        if done.returncode or ends != [3 * every - 1] * size:
            kept = shutil.copy(folder / "output.txt", Path(tempfile.gettempdir(), f"{kind}.txt"))
            raise SystemExit(f"{kind}: exit code {done.returncode}, steps {ends}; see {kept}")
        struck = float((folder / "struck").read_text())
    firsts = [next(one for one in rank if one["pid"] != rank[0]["pid"]) for rank in notes]
    starts = min(one["began"] for one in firsts) - struck
    trains = max(one["time"] for one in firsts) - struck
    last = max(one["step"] for rank in notes for one in rank if one["pid"] == rank[0]["pid"])
    return starts, trains, last + 1 - firsts[0]["step"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps between two saves")
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in random.Random(number).sample(kinds, len(kinds)):
            rng = random.Random(f"{options.seed} {number}")  # the same strike for each kind
            found[kind].append(restarted(kind, options.ranks, options.every, rng))
    print(f"{options.ranks} ranks, saved every {options.every} steps, {options.rounds} kills")
    titles = f"{'s until all train':>18}{'from':>8}{'to':>8}{'s until a start':>17}{'repeated':>10}"
    print(f"  {'':10}{titles}")
    for kind, rows in found.items():
        starts, trains, steps = zip(*rows, strict=True)
        print(
            f"  {kind:10}{statistics.median(trains):18.2f}{min(trains):8.2f}{max(trains):8.2f}"
            f"{statistics.median(starts):17.2f}{statistics.median(steps):10.0f}"
        )


if __name__ == "__main__":
    main()
