"""Every command that looks at a sweep, on a sweep that everything happened to.

    python tests/proofs/watched_sweep.py [--keep FOLDER]

Twenty jobs on a throwaway Slurm cluster: some are preempted, killed, cancelled, raise or hang, some
finish, some still train; these are suspended, so that they change no file themselves. Then each
command of docs/how-to/watch-a-sweep.md runs, with its output in a file. Looking may change nothing:
no file of the sweep may have another size or time of change afterwards, and no job another state
for Slurm. Only `cancel` and `resume` may. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing, wait_for
from showcase_jobs import table
from slurm_apps import CONF, SlurmApp, urgent
from slurm_apps import table as mapping
from started import ended_here

import forge
from forge.jobdir.job_state import State
from forge.process import processes

FATES = {"plain": 8, "trains": 3, "preempted": 3, "killed": 2, "raises": 2, "gone": 1, "hung": 1}
"""What happens to the jobs -> how many of them; the number is part of a job's `kind`."""
KINDS = [f"{fate}{number}" for fate, count in FATES.items() for number in range(count)]
MISBEHAVE = """
    if cfg.kind.startswith("raises") and step == 17:
        raise ValueError("planted error")
    if cfg.kind.startswith("killed") and step == 17 and not RESTARTS:
        os.kill(os.getpid(), signal.SIGKILL)
    waits = cfg.kind.startswith(("trains", "hung")) or (RESTARTS and "preempted" in cfg.kind)
    if waits and step == 20:
        Path(cfg.gates, f"{cfg.kind} waits").touch()
        while not stopping.is_stopping():
            time.sleep(0.02)
"""
HEAD = ["command", "exit code", "s", "lines", "what it changed", ""]


def everything_in(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Path -> size, and the times of the last change, of each file and directory."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[path] = status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return found


def disturb(app: SlurmApp) -> None:
    """Start the sweep, and do everything to it; at the end some jobs hold, and nothing changes."""
    held = [kind for kind in KINDS if kind.startswith(("preempted", "gone"))]
    nodes = {kind: "n2" for kind in KINDS if kind.startswith("preempted")}
    sweep = app.start(
        f"kind={','.join(KINDS)}",
        f"++holds={mapping(**dict.fromkeys(held, 1))}",
        f"++nodes={mapping(**nodes)}",
        "++hang={hung0:2}",
        "hydra.launcher.wait=false",
    )
    assert sweep.wait(300) == 0, sweep.output
    for kind in held:
        wait_for((app.gates / f"{kind} 0").exists, f"step of {kind}", 300)
    app.jobs()["gone0"].scancel()
    urgent(app.cluster, app.folder, "--nodelist=n2")
    waiting = [kind for kind in KINDS if kind.startswith(("trains", "hung", "preempted"))]
    for kind in waiting:
        wait_for((app.gates / f"{kind} waits").exists, f"{kind} to wait", 300)

    def is_quiet() -> bool:
        jobs = dict(zip(KINDS, forge.sweep(app.sweep_dir).jobs, strict=True))
        ended = [job.state.is_final for kind, job in jobs.items() if kind not in waiting]
        return all(ended) and bool(jobs["hung0"].hang)

    wait_for(is_quiet, "a sweep in which only waiting jobs are left", 300)


LOOKS = (
    *("status SWEEP", "status --failed SWEEP", "status --group-by kind SWEEP"),
    *("status --json SWEEP", "why SWEEP", "why --json SWEEP"),
    *(f"why SWEEP kind={fate}0" for fate in FATES),
    *("logs SWEEP kind=raises0", "logs SWEEP kind=preempted0"),
    *("resume SWEEP --dry-run", "status SWEEP --csv"),
    *("report SWEEP -o report.html", "verify SWEEP", "doctor"),
)
CHANGES = ("cancel SWEEP kind=trains0", "resume SWEEP kind=gone0 timeout_min=20")


class Looks:
    """Runs the commands, and compares."""

    def __init__(self, app: SlurmApp, folder: Path) -> None:
        self.app = app
        self.folder = folder
        self.rows: list[list[str]] = []
        self.problems = 0

    def queue(self) -> str:
        """What Slurm knows of all jobs, but for the time that they have run."""
        return self.app.cluster.run("squeue", "--noheader", "--format=%i %T %r %N %l")

    def run(self, command: str, *, may_change: bool) -> None:
        """Run a command of forge; its output goes into a file."""
        words = command.replace("SWEEP", str(self.app.sweep_dir)).split()
        before, queue, began = everything_in(self.app.sweep_dir), self.queue(), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "forge", *words],
            cwd=self.folder,
            env=os.environ | self.app.environment | {"COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        took_s = time.monotonic() - began
        name = "".join(letter if letter.isalnum() else "_" for letter in command)
        (self.folder / f"{name}.txt").write_text(done.stdout)
        after = everything_in(self.app.sweep_dir)
        changed = [path for path in before | after if before.get(path) != after.get(path)]
        is_same_queue = queue == self.queue()
        what = f"{len(changed)} files" + ("" if is_same_queue else ", jobs of Slurm's")
        is_right = may_change or (not changed and is_same_queue)
        is_right &= done.returncode == 0
        self.problems += not is_right
        lines = str(done.stdout.count("\n"))
        cells = [f"forge {command}", str(done.returncode), f"{took_s:.1f}", lines, what]
        self.rows.append([*cells, "" if is_right else f"WRONG: {changed[:3]} {done.stdout[-300:]}"])
        print(" | ".join(self.rows[-1]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="folder for the outputs of the commands")
    options = parser.parse_args()
    if problem := missing():
        print(problem)
        return 2
    timeout = 'resilience:\n      hang: {timeout_s: "${oc.select:hang.${kind},null}"}\n'
    conf = CONF.replace("resilience:\n", timeout) + "    hang: {}\n"
    with tempfile.TemporaryDirectory(prefix="forge-watched-") as folder, ended_here():
        cluster = Cluster(Path(folder) / "slurm")
        try:
            with contextlib.closing(
                SlurmApp(cluster, Path(folder) / "app", conf=conf, misbehave=MISBEHAVE)
            ) as app:
                disturb(app)
                kept = options.keep or Path(folder) / "outputs"
                kept.mkdir(parents=True, exist_ok=True)
                looks = Looks(app, kept.resolve())
                pids = [pid for job in app.jobs_by_place() for pid in job.marked]
                for pid in pids:
                    processes.send(pid, signal.SIGSTOP)  # so that no job changes a file itself
                for command in LOOKS:
                    looks.run(command, may_change=False)
                for pid in pids:
                    processes.send(pid, signal.SIGCONT)
                for command in CHANGES:
                    looks.run(command, may_change=True)
                counts = forge.sweep(app.sweep_dir).counts()
        finally:
            cluster.stop()
        states = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        print(f"\n{table(looks.rows, HEAD)}\n\n{sum(counts.values())} jobs: {states}")
        print(f"{len(looks.rows) - looks.problems} of {len(looks.rows)} commands as they should be")
        return int(bool(looks.problems))


if __name__ == "__main__":
    sys.exit(main())
