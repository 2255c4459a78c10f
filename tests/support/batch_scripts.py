"""Batch scripts as users write them, run on a throwaway cluster, and what becomes of their jobs.

The script's training holds still in its first start until it is disturbed; each step is noted, so
that what a later start repeats can be counted.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

from cluster import Cluster, submit, wait_for

from forge.jobdir.job_files import STATE, VERDICT, forge_dir, read_json

STEPS, HOLD = 12, 5
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL")
TRAIN = """
    import hashlib, os, sys, time
    from pathlib import Path
    import torch
    import forge
    from forge.shutdown import stopping

    name = sys.argv[1]
    options = dict(one.split("=") for one in sys.argv[2:])
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    world = forge.distributed.init()
    start = os.environ.get("SLURM_RESTART_COUNT", "0")

    def note(what, text):
        with open(folder / f"{what}.{world.rank}", "a") as file:
            file.write(f"{text}\\n")

    def is_held():
        return start in options.get("holds", "0").split(",")

    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    if world.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    class Slow:
        def state_dict(self):
            if "slow" in options and start == "0" and stopping.is_stopping():
                note("saving", start)
                while not (folder / "cancelled").exists():
                    time.sleep(0.02)
            return {}

        def load_state_dict(self, state):
            pass

    policy = {
        "checkpoint": {"dir": str(folder / "run"), "every_steps": 100, "every_s": None},
        "shutdown": {"timeout_s": 20.0},
        "signal": {"lead_s": 30.0},
        "health": {"enabled": False},
        "requeue": {
            "enabled": "disabled" not in options,
            "max_preemptions": int(options.get("budget", 5)),
        },
    }
    note("starts", start)
    with forge.Run(policy, model=model, optimizer=optimizer, slow=Slow()) as run:
        run.on_stop(lambda: note("callbacks", start))
        for step in run.steps(int(options.get("steps", STEPS))):
            note("steps", step)
            loss = (model(torch.randn(4, 4)) - 1).square().mean()
            loss.backward()
            run.update(loss, optimizer)
            if step == HOLD and is_held():
                note("waits", os.getpid())
                while not (stopping.is_stopping() or run.is_stopping):
                    time.sleep(0.02)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    note("result", hashlib.sha256(weights).hexdigest())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
""".replace("STEPS", str(STEPS)).replace("HOLD", str(HOLD))


class Folder:
    """Where the user's script lies, with the cluster that runs it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "train.py").write_text(textwrap.dedent(TRAIN))
        self.python = sys.executable

    def submit(self, name: str, script: str, *options: str) -> BatchScript:
        """A batch script; `train` in it is the training of this name."""
        place = self.folder / f"{name} job"
        place.mkdir()
        lines = script.replace("$train", f"{self.python} ../train.py '../{name}'")
        head = f"export PATH={Path(self.python).parent}:$PATH OMP_NUM_THREADS=1"
        number = submit(self.cluster, place, f"{head}\n{textwrap.dedent(lines)}", *options)
        return BatchScript(self, name, number, place)


class BatchScript:
    """One job."""

    def __init__(self, folder: Folder, name: str, number: str, place: Path) -> None:
        self.cluster, self.name, self.number, self.place = folder.cluster, name, number, place
        self.notes = folder.folder / name

    def noted(self, what: str, rank: int = 0) -> list[str]:
        """The lines so far."""
        path = self.notes / f"{what}.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, count: int = 1, ranks: int = 1) -> None:
        """Until every rank holds for the `count`th time."""
        ready = lambda: all(len(self.noted("waits", r)) >= count for r in range(ranks))  # noqa: E731
        wait_for(ready, f"waiting job {self.name}: {self.output}", 120)

    @property
    def shown(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return self.cluster.show(self.number)

    @property
    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.place.glob("slurm-*.out")))

    def end(self, timeout_s: float = 240) -> tuple[str, int]:
        """(state, restarts) once it has ended."""
        wait_for(lambda: self.shown["JobState"] in ENDED, f"end of {self.name}", timeout_s)
        shown = self.shown
        return shown["JobState"], int(shown["Restarts"])

    @property
    def repeated(self) -> int:
        """Steps that were done more than once."""
        return len(self.noted("steps")) - len(set(self.noted("steps")))

    @property
    def state(self) -> dict:
        return read_json(forge_dir(self.notes / "run") / STATE) or {}

    @property
    def verdict(self) -> dict:
        return read_json(forge_dir(self.notes / "run") / VERDICT) or {}

    def scancel(self, *options: str) -> None:
        self.cluster.run("scancel", *options, self.number)


def preempt(cluster: Cluster, folder: Path, *options: str) -> str:
    """A job that preempts whatever runs on its nodes."""
    place = folder / f"urgent {os.urandom(4).hex()}"
    place.mkdir()
    return submit(cluster, place, "sleep 0.1", "--partition=urgent", "--exclusive", *options)
