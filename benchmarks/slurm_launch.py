"""What submitting a sweep to Slurm costs: `submitit_slurm` of hydra-submitit-launcher, and `slurm`.

    python benchmarks/slurm_launch.py [--jobs N] [--rounds N]

On a throwaway cluster of its own. The jobs are arrays that are held, so that nothing runs and only
the submission is measured: the time inside the launcher's `launch()` until everything is submitted,
and what then lies below the sweep's directory. Before it, Hydra's basic sweeper composes every
job's config once, to check it, whichever launcher comes: that is Hydra's own share. submitit's
launcher has composed nothing by then, its jobs do; forge's composes each once more, and freezes
it. Each round runs both, in an order of its own. Afterwards everything is cancelled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import launch
from launch import median

from forge.launch.local.resources import cores

sys.path.insert(0, str(launch.ROOT / "tests" / "support"))

from cluster import Cluster, missing

MOST_JOBS = 1000  # submitit makes one array, and MaxArraySize is 1001
CLOCK = '''
"""Imported by the app: reports what its sweep took, and ends it once all is submitted."""

import json, os, time
from pathlib import Path
import submitit
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

found = {}

def now():
    cpu = os.times()
    mine, children = cpu.user + cpu.system, cpu.children_user + cpu.children_system
    return time.perf_counter(), mine + children

def timed(name, function):
    def call(*args, **kwargs):
        begin = now()
        try:
            return function(*args, **kwargs)
        finally:
            for unit, value, before in zip(("wall", "cpu"), now(), begin):
                found[f"{name}_{unit}_s"] = value - before
    return call

class Submitted(BaseException):
    """What follows in submitit's launcher is the wait for the jobs."""

def map_array(self, *args):
    mapping(self, *args)
    raise Submitted

def instantiate_launcher(self, **kwargs):
    launcher = instantiating(self, **kwargs)
    launching = timed("launch", type(launcher).launch)
    def launch(*args, **kwargs):
        try:
            launching(*args, **kwargs)
        except Submitted:
            pass
        Path(os.environ["FOUND"]).write_text(json.dumps(found))
        os._exit(0)
    type(launcher).launch = launch  # the object itself is pickled into submitit's jobs
    return launcher

instantiating, Plugins.instantiate_launcher = Plugins.instantiate_launcher, instantiate_launcher
Sweeper.validate_batch_is_legal = timed("check", Sweeper.validate_batch_is_legal)
mapping, submitit.AutoExecutor.map_array = submitit.AutoExecutor.map_array, map_array
'''
HELD = "+hydra.launcher.additional_parameters={hold:true}"
LAUNCHERS = {
    "submitit_slurm": ["hydra/launcher=submitit_slurm", HELD],
    "slurm": ["hydra/launcher=slurm", HELD, "hydra.launcher.wait=false"],
}


@dataclass(frozen=True)
class Cost:
    """Of one sweep."""

    launch_wall_s: float
    launch_cpu_s: float
    check_wall_s: float
    check_cpu_s: float
    process_s: float
    """From its start until everything was submitted."""
    bytes: int
    """Below the sweep's directory, before any job has started."""
    files: int
    folders: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What submitting a sweep to Slurm costs.")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not 2 <= options.jobs <= MOST_JOBS:
        parser.error(f"--jobs={options.jobs}: expected 2 to {MOST_JOBS}, which fit into one array")
    problem = missing()
    if problem:
        print(f"benchmarks/slurm_launch.py measures nothing: {problem}")
        return
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        cluster = Cluster(Path(folder) / "slurm")
        try:
            costs = measure(cluster, Path(folder), options.jobs, options.rounds)
        finally:
            cluster.stop()
    show(costs, options.jobs, options.rounds)


def measure(cluster: Cluster, folder: Path, num_jobs: int, rounds: int) -> dict[str, list[Cost]]:
    """Launcher -> its cost in every round."""
    (folder / "clock.py").write_text(CLOCK)
    (folder / "trivial.py").write_text("import clock\n" + launch.APP)
    (folder / "trivial.yaml").write_text("i: 0\n")
    found: dict[str, list[Cost]] = {name: [] for name in LAUNCHERS}
    for number in range(-1 if rounds > 1 else 0, rounds):
        names = list(LAUNCHERS)
        random.Random(number).shuffle(names)
        for name in names:
            # Round -1 fills caches, bytecode among them: a few jobs do. One round has none.
            count = num_jobs if number >= 0 else 2
            cost = run(cluster, folder, name, count, folder / f"{name}_{number}")
            if number >= 0:
                found[name].append(cost)
    return found


def run(cluster: Cluster, folder: Path, name: str, num_jobs: int, sweep: Path) -> Cost:
    """Submit one sweep, look at what was written, and cancel it."""
    told = folder / "found.json"
    outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    command = [sys.executable, "trivial.py", "-m", *LAUNCHERS[name], f"i=range({num_jobs})"]
    begin = time.perf_counter()
    subprocess.run(
        [*command, f"hydra.sweep.dir={sweep}"],
        cwd=folder,
        env=outer | cluster.environment | {"PYTHONPATH": str(launch.ROOT), "FOUND": str(told)},
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process_s = time.perf_counter() - begin
    queued = cluster.run("squeue", "--noheader", "--array", "--format=%T").split()
    assert queued == ["PENDING"] * num_jobs, f"{name}: {len(queued)} jobs of {num_jobs}"
    written = list(sweep.rglob("*"))
    files = [path for path in written if path.is_file() and not path.is_symlink()]
    num_folders = sum(path.is_dir() for path in written)
    cluster.run("scancel", "--user", str(os.getuid()))
    size = sum(path.stat().st_size for path in files)
    return Cost(
        **json.loads(told.read_text()),
        process_s=process_s,
        bytes=size,
        files=len(files),
        folders=num_folders,
    )


def show(costs: dict[str, list[Cost]], num_jobs: int, rounds: int) -> None:
    """The table."""
    version = sys.version.split()[0]
    print(
        f"medians of {rounds} interleaved rounds, sweeps of {num_jobs} trivial jobs that are held,"
        f" {cores()} cores, Python {version}\n"
    )
    print(f"{'a job':20}{'launch()':>17}{'Hydra checking':>17}{'written below the sweep':>32}")
    milliseconds = f"{'wall ms':>9}{'CPU ms':>8}"
    print(f"{'hydra/launcher=':20}{2 * milliseconds}{'bytes':>12}{'files':>10}{'folders':>10}")
    for name, found in costs.items():
        total = {key.name: median(found, key.name) for key in fields(Cost)}
        each = {key: value / num_jobs for key, value in total.items()}
        times = [1000 * each[f"{part}_s"] for part in ("launch_wall", "launch_cpu")]
        times += [1000 * each[f"{part}_s"] for part in ("check_wall", "check_cpu")]
        shown = "".join(f"{ms:{width}.2f}" for ms, width in zip(times, (9, 8, 9, 8), strict=True))
        shown += f"{each['bytes']:12.0f}{each['files']:10.3f}{each['folders']:10.3f}"
        print(f"{name:20}{shown}")
    print()
    for name, found in costs.items():
        print(f"{name}: {median(found, 'process_s'):.1f} s until the command had submitted them")
    ratio = statistics.median(
        ours.launch_wall_s / theirs.launch_wall_s
        for ours, theirs in zip(costs["slurm"], costs["submitit_slurm"], strict=True)
    )
    print(f"slurm / submitit_slurm, inside launch(), median of each round's ratio: {ratio:.3f}")


if __name__ == "__main__":
    main()
