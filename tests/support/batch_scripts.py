"""Batch scripts as users write them, run on a throwaway cluster, and what becomes of their jobs.

The script's training holds still in its first start until it is disturbed; each step is noted, so
that what a later start repeats can be counted.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import warm
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

    POLICY = {
        "checkpoint": {"every_steps": 100, "every_s": None},
        "shutdown": {"timeout_s": 20.0},
        "signal": {"warning_s": 30.0},
        "health": {"enabled": False},
    }

    def train(folder, options, policy):
        folder.mkdir(exist_ok=True)
        world = forge.distributed.init()
        start = os.environ.get("SLURM_RESTART_COUNT", "0")

        def note(what, text):
            with open(folder / f"{what}.{world.rank}", "a") as file:
                file.write(f"{text}\\n")

        class Slow:
            def state_dict(self):
                if "slow" in options and start == "0" and stopping.is_stopping():
                    note("saving", start)
                    while not (folder / "cancelled").exists():
                        time.sleep(0.02)
                return {}

            def load_state_dict(self, state):
                pass

        torch.set_num_threads(1)
        torch.manual_seed(int(options.get("seed", 3)))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        if world.size > 1:
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        note("starts", start)
        with forge.Run(policy, model=model, optimizer=optimizer, slow=Slow()) as run:
            run.on_stop(lambda: note("callbacks", start))
            for step in run.steps(STEPS):
                note("steps", step)
                loss = (model(torch.randn(4, 4)) - 1).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                if step == HOLD + 3 * int(start) and start in options.get("holds", "0").split(","):
                    note("waits", os.getpid())
                    while not (stopping.is_stopping() or run.is_stopping):
                        time.sleep(0.02)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        note("result", hashlib.sha256(weights).hexdigest())
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    if __name__ == "__main__":
        options = dict(one.split("=") for one in sys.argv[2:])
        requeue = {
            "enabled": "disabled" not in options,
            "max_preemptions": int(options.get("budget", 5)),
        }
        checkpoint = POLICY["checkpoint"] | {"dir": f"{sys.argv[1]}/run"}
        policy = POLICY | {"requeue": requeue, "checkpoint": checkpoint}
        train(Path(sys.argv[1]), options, policy)
""".replace("STEPS", str(STEPS)).replace("HOLD", str(HOLD))
HYDRA = """
    from pathlib import Path
    import hydra
    from train import train

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        train(Path(f"{cfg.name} {cfg.seed}"), {"seed": cfg.seed}, cfg.resilience)

    if __name__ == "__main__":
        main()
"""
CONF = """
    defaults: [{resilience: default}, _self_]
    name: ???
    seed: 3
    resilience:
      checkpoint: {every_steps: 100, every_s: null}
      shutdown: {timeout_s: 20}
      signal: {warning_s: 30}
      health: {enabled: false}
"""
COMMAND = """
    import os, signal, sys, time
    from pathlib import Path

    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    saved = folder / "saved"
    stops = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    start = os.environ.get("SLURM_RESTART_COUNT", "0")

    def note(what, text):
        with open(folder / f"{what}.0", "a") as file:
            file.write(f"{text}\\n")

    step = int(saved.read_text()) if saved.exists() else 0
    note("starts", start)
    while step < STEPS:
        note("steps", step)
        if step == HOLD and start == "0":
            note("waits", os.getpid())
            while not stops:
                time.sleep(0.02)
        step += 1
        if stops:
            note("saving", start)
            while "slow=1" in sys.argv and not (folder / "cancelled").exists():
                time.sleep(0.02)
            saved.write_text(str(step))
            note("callbacks", start)
            sys.exit(0)
    note("result", step)
""".replace("STEPS", str(STEPS)).replace("HOLD", str(HOLD))
COLLIDES = "srun python $forge/hydra_train.py name=$name seed=$SLURM_ARRAY_TASK_ID"
COLLIDES += " 'hydra.run.dir=../${now:%Y-%m-%d}'"
"""In an array: each task has the same directory, as Hydra's default one in the same second."""
FILES = {"train.py": TRAIN, "hydra_train.py": HYDRA, "conf.yaml": CONF, "command.py": COMMAND}


class Folder:
    """The folder of the user's scripts, and the cluster that runs them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        for name, text in FILES.items():
            (folder / name).write_text(textwrap.dedent(text))

    def submit(self, name: str, script: str, *options: str) -> BatchScript:
        """A batch script of this name.

        In it, `$train` is the training, `$args` lacks python, and `$exec` is the command that knows
        nothing of forge.
        """
        place = self.folder / f"{name} job"
        place.mkdir()
        args = f"{self.folder}/train.py '{self.folder}/{name}'"
        command = f"forge exec -- python {self.folder}/command.py '{self.folder}/{name}'"
        lines = script.replace("$train", f"python {args}").replace("$args", args)
        lines = lines.replace("$exec", command)
        head = f"export PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1"
        head += f" forge={self.folder} name='{self.folder}/{name}'"
        options = ("--open-mode=append", *options)
        number = submit(self.cluster, place, f"{head}\n{textwrap.dedent(lines)}", *options)
        return BatchScript(self, name, number, place)

    def result_here(self, seed: int = 3) -> list[str]:
        """The lines of the result file of an uninterrupted training on this machine."""
        notes = self.folder / f"undisturbed seed {seed}"
        command = [sys.executable, "train.py", str(notes), f"seed={seed}", "holds=none"]
        if not notes.exists():
            done = warm.run(command, cwd=self.folder, timeout=120, start_new_session=True)
            assert done.returncode == 0
        return (notes / "result.0").read_text().splitlines()


class BatchScript:
    """One job."""

    def __init__(self, folder: Folder, name: str, number: str, place: Path) -> None:
        self.folder, self.cluster = folder, folder.cluster
        self.name, self.number, self.place = name, number, place
        self.notes = folder.folder / name

    def winner(self) -> BatchScript:
        """Of an array whose tasks share a directory: the task that trains, once others have ended.

        Each task's training has the name `<name> <task>`.
        """

        def left() -> list[str]:
            squeue = ("squeue", "--noheader", "--array", f"--jobs={self.number}", "--format=%K")
            return self.cluster.run(*squeue).split()

        wait_for(lambda: len(left()) == 1, f"end of all tasks but one of {self.number}", 240)
        task = left()[0]
        return BatchScript(self.folder, f"{self.name} {task}", f"{self.number}_{task}", self.place)

    def noted(self, what: str, rank: int = 0, training: str = "") -> list[str]:
        """The lines so far, of a training of another name than the job's if there are several."""
        path = self.notes.parent / (training or self.name) / f"{what}.{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, count: int = 1, ranks: int = 1, training: str = "") -> None:
        """Until every rank holds for the `count`th time."""

        def ready() -> bool:
            return all(len(self.noted("waits", rank, training)) >= count for rank in range(ranks))

        wait_for(ready, f"waiting job {self.name}", 240)

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

    def repeated(self, training: str = "") -> int:
        """Steps that were done more than once."""
        steps = self.noted("steps", training=training)
        return len(steps) - len(set(steps))

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
