"""`forge exec` over awkward programs, here and on a true Slurm: what each ended as, in tables.

    python tests/proofs/any_command.py

Here each command is asked to stop once by a SIGTERM, on the cluster once by a preemption that hits
all of them. Then, on the cluster: the bash script of the examples is preempted twice, comes to its
time limit once and finishes; another one is cancelled; and a sweep of four commands without forge
is preempted, and has to end with the bits of one that nobody disturbed.
Exits with 1 where something is not as it should be.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cluster import Cluster, missing, wait_for
from commands import COMMANDS, Commands, SlurmCommands, ends, is_ready, wait_ready
from harness import Process
from showcase_jobs import table
from slurm_apps import SlurmJob, urgent
from sweeps import SweptJob

from forge.process import processes

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = ["command", "attempts (state, reason, exit code)", "restarts", "state", "left"]
CODES = {"pipeline": -15, "deaf": -9, "torchrun": 1}
"""The exit codes of commands that are asked to stop; of the others it is 0."""


class Checks:
    """Rows of a table, and what is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._rows: list[list[str]] = []

    def add(self, name: str, job: SweptJob, *expected: str) -> None:
        """A job that has ended; `expected` is how each of its attempts should have."""
        found, left = ends(job), len(job.marked)
        restarts = job.state["counts"]["restarts"]
        row = [name, "; ".join(found), str(restarts), job.state["state"], str(left)]
        self._rows.append(row)
        if found != list(expected) or left or restarts != len(found) - 1:
            self.problems.append(f"{name}: expected {'; '.join(expected)}, found {row}")

    def show(self, title: str) -> None:
        """Print what was added since the last call."""
        print(f"\n{title}\n{table(self._rows, HEAD)}", flush=True)
        self._rows = []


def here(folder: Path, checks: Checks) -> None:
    """Every awkward command, asked to stop once."""
    commands = Commands(folder)
    kinds = f"kind={','.join(COMMANDS)}"
    sweep = commands.start("--config-name", "conf", kinds, "hydra.launcher.n_jobs=7")
    for number, name in enumerate(COMMANDS):
        job = commands.job(number)
        wait_ready(job, sweep)
        if name == "torchrun":
            sweep.wait_for((job.directory / "ready 1").exists, "second rank")
        processes.send(job.supervisor, signal.SIGTERM)
    assert sweep.wait() == 0, sweep.output
    for number, name in enumerate(COMMANDS):
        first = f"terminated signalled {CODES.get(name, 0)}"
        checks.add(name, commands.job(number), first, "finished finished 0")
    checks.show("On this machine, each asked to stop once by SIGTERM")


def on_slurm(cluster: Cluster, folder: Path, checks: Checks) -> None:
    """Every awkward command, all of them preempted at once."""
    commands = SlurmCommands(cluster, folder)
    kinds = f"kind={','.join(COMMANDS)}"
    sweep = commands.start("--config-name", "conf", kinds, "resilience.slurm.nodelist=n2")
    commands.wait_for_jobs(sweep, len(COMMANDS))
    jobs = commands.jobs()
    sweep.wait_for(lambda: all(map(is_ready, jobs.values())), "hold of all")
    sweep.wait_for((jobs["torchrun"].directory / "ready 1").exists, "second rank")
    urgent(cluster, folder, "--nodelist=n2")
    assert sweep.wait(400) == 0, sweep.output
    for name, job in jobs.items():
        first = f"terminated preempted {CODES.get(name, 0)}"
        checks.add(name, job, first, "finished finished 0")
    checks.show("On Slurm, all preempted once (GraceTime 10 s)")
    commands.close()


def started(job: SlurmJob, times: int, sweep: Process, steps_s: float = 4.0) -> None:
    """Until its script has begun so often, and has had time for a few steps."""
    log = job.directory / "output.log"
    begun = re.compile("^starts at step", re.MULTILINE)
    is_there = lambda: log.exists() and len(begun.findall(log.read_text())) >= times  # noqa: E731
    sweep.wait_for(is_there, f"start {times} of {job.directory}", 300)
    select.select([], [], [], steps_s)


def example(cluster: Cluster, folder: Path, checks: Checks) -> None:
    """The bash script: preempted twice, at its time limit once; another one is cancelled."""
    script = str(EXAMPLES / "save_in_trap.sh")
    common = ("hydra.launcher.timeout_min=1", "resilience.signal.warning_s=14")
    apps = [SlurmCommands(cluster, folder.with_name(name)) for name in ("struck", "cancelled")]
    sweeps = [
        app.begin([script, "90"], *common, f"resilience.slurm.nodelist={node}")
        for app, node in zip(apps, ("n2", "n1"), strict=True)
    ]
    for app, sweep in zip(apps, sweeps, strict=True):
        sweep.wait_for((app.sweep_dir / "0" / ".forge" / "state.json").exists, "job")
    struck, cancelled = (app.jobs_by_place()[0] for app in apps)
    started(cancelled, 1, sweeps[1])
    cancelled.scancel()
    for times in (1, 2):
        started(struck, times, sweeps[0])
        urgent(cluster, apps[0].folder, "--nodelist=n2")
        sweeps[0].wait_for(lambda n=times: len(ends(struck)) >= n, "end of the attempt")
    started(struck, 4, sweeps[0])  # the third has come to its limit by itself
    cluster.run("scontrol", "update", f"JobId={struck.slurm_id}", "TimeLimit=10")
    assert sweeps[0].wait(400) == 0, sweeps[0].output
    assert sweeps[1].wait() == 1
    stops = [f"terminated {reason} 75" for reason in ("preempted", "preempted", "time_limit")]
    checks.add("save_in_trap.sh 90", struck, *stops, "finished finished 0")
    checks.add("save_in_trap.sh 90, scancel", cancelled, "terminated cancelled 75")
    checks.show("On Slurm, the bash script of the examples")
    for job, state in ((struck, "COMPLETED"), (cancelled, "CANCELLED")):
        wait_for(lambda j=job, s=state: j.shown["JobState"] == s, f"{state} in Slurm's eyes")
        words = job.shown
        shown = ", ".join(f"{name}={words[name]}" for name in ("JobState", "Restarts", "ExitCode"))
        print(f"scontrol show job {job.slurm_id}: {shown}")
    print("\noutput.log of the first:\n" + struck.output)
    for app in apps:
        app.close()


def sweep_of_four(cluster: Cluster, folder: Path, checks: Checks) -> None:
    """Four commands of a config, preempted in the middle."""
    lines: list[dict[str, str]] = []
    names = ["lr=0.1 seed=1", "lr=0.1 seed=2", "lr=0.2 seed=1", "lr=0.2 seed=2"]
    conf = ["--config-dir", str(EXAMPLES / "conf"), "--config-name", "command"]
    for app in (Commands(folder / "quiet"), SlurmCommands(cluster, folder / "struck")):
        os.symlink(EXAMPLES, app.folder / "examples")
        is_struck = isinstance(app, SlurmCommands)
        more = ["resilience.slurm.nodelist=n2", "step_s=0.2"] if is_struck else []
        sweep = app.start(*conf, "lr=0.1,0.2", "seed=1,2", *more)
        if is_struck:
            app.wait_for_jobs(sweep, 4)
            for job in app.jobs_by_place():
                started(job, 1, sweep, steps_s=1.0)
            urgent(cluster, app.folder, "--nodelist=n2")
        assert sweep.wait(400) == 0, sweep.output
        jobs = [app.job(number) for number in range(4)]
        lines.append(
            {n: (j.directory / "line.txt").read_text() for n, j in zip(names, jobs, strict=True)}
        )
        if is_struck:
            for name, job in zip(names, jobs, strict=True):
                checks.add(name, job, "terminated preempted 75", "finished finished 0")
            app.close()
    checks.show("On Slurm, a sweep of four commands, all preempted once")
    print(f"same bits as undisturbed ones: {lines[0] == lines[1]}")
    if lines[0] != lines[1]:
        checks.problems.append(f"other bits: {lines}")


def main() -> int:
    """Run all of it."""
    problem = missing()
    if problem:
        sys.exit(problem)
    checks, began = Checks(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forge-commands-") as name:
        folder = Path(name)
        here(folder / "here", checks)
        cluster = Cluster(folder / "slurm")
        try:
            on_slurm(cluster, folder / "awkward", checks)
            example(cluster, folder / "example", checks)
            (folder / "four").mkdir()
            sweep_of_four(cluster, folder / "four", checks)
        finally:
            cluster.stop()
    print(f"\n{len(checks.problems)} problems, after {time.monotonic() - began:.0f} s")
    print("\n".join(checks.problems))
    return 1 if checks.problems else 0


if __name__ == "__main__":
    sys.exit(main())
