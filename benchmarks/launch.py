"""What launching a sweep costs: Hydra's own launcher, submitit's on this machine, and forge's.

    python benchmarks/launch.py [--jobs N] [--rounds N]

The jobs return at once and import no torch, so all the time is the launchers'. Each round runs
every launcher once, in an order of its own. Hydra's own runs the jobs inside its process: the
floor, and no isolation. CPU seconds are those of every process of the sweep, detached ones too:
orphans become children of this one, and are waited for. Then the pieces of one job of forge's
launcher, each run by itself, and interleaved too.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from forge.jobdir.job_files import STATE, forge_dir, read_json  # noqa: E402
from forge.launch.local.queue import _START  # noqa: E402
from forge.launch.local.resources import cores  # noqa: E402
from forge.process import children, processes  # noqa: E402

MARK = "FORGE_BENCHMARK"
APP = """
import hydra

@hydra.main(version_base=None, config_path=".", config_name="trivial")
def main(cfg):
    pass

main()
"""
LAUNCHERS = {
    "basic": ["hydra/launcher=basic"],
    "submitit_local": ["hydra/launcher=submitit_local"],
    "local": ["hydra/launcher=local", "hydra.launcher.progress=none"],
}
LAUNCHER_IMPORTS = "import hydra; import forge.launch.local.launcher"
WRAPPER_IMPORTS = f"import sys; sys.path.append({str(ROOT)!r}); import forge.job.local"
TASK_IMPORTS = (
    "import forge.launch.task, forge.launch.payload; from hydra.core.utils import run_job"
)
TASK_READS = f"""{TASK_IMPORTS}
import sys
from pathlib import Path
from forge.jobdir.job_files import PLAN, TASK, forge_dir, read_json
folder = forge_dir(Path(sys.argv[1]))
forge.launch.payload.import_main(read_json(folder / PLAN)["main"])
forge.launch.payload.load((folder / TASK).read_bytes())
"""
_WRAPPER = ["-I", "-S"]


@dataclass(frozen=True)
class Cost:
    """Of one command."""

    wall_s: float
    cpu_s: float
    left: int
    """Processes that were alive when the command had ended."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What launching a sweep costs.")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    children.adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        costs = measure_sweeps(Path(folder), options.jobs, options.rounds)
        pieces = measure_pieces(Path(folder), options.rounds)
    version = sys.version.split()[0]
    print(
        f"medians of {options.rounds} interleaved rounds, sweeps of {options.jobs} trivial jobs,"
        f" {cores()} cores, Python {version}\n"
    )
    print(f"{'hydra/launcher=':20}{'wall s':>8}{'CPU s':>8}{'CPU ms a job':>14}{'left':>6}")
    for name, found in costs.items():
        wall_s, cpu_s = median(found, "wall_s"), median(found, "cpu_s")
        left = max(cost.left for cost in found)
        each = 1000 * cpu_s / options.jobs
        print(f"{name:20}{wall_s:8.2f}{cpu_s:8.2f}{each:14.0f}{left:6}")
    wall, cpu = (
        statistics.median(
            getattr(ours, field) / getattr(theirs, field)
            for ours, theirs in zip(costs["local"], costs["submitit_local"], strict=True)
        )
        for field in ("wall_s", "cpu_s")
    )
    print(f"\nlocal / submitit_local, median of each round's ratio: wall {wall:.2f}, CPU {cpu:.2f}")
    print("left: the most processes of a sweep that were alive when its command had ended")
    show_breakdown(pieces)


def median(found: Sequence[object], field: str) -> float:
    """Of one field."""
    return float(statistics.median(getattr(cost, field) for cost in found))


def run(command: list[str], cwd: Path) -> Cost:
    """Run a command, wait for all that it leaves behind, and report what it took."""
    mark = uuid.uuid4().hex
    before = _children_cpu_s()
    begin = time.perf_counter()
    subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark},
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wall_s = time.perf_counter() - begin
    left = len(processes.marked(MARK, mark))
    while True:  # whoever was not waited for has become our child
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return Cost(wall_s, _children_cpu_s() - before, left)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_sweeps(folder: Path, num_jobs: int, rounds: int) -> dict[str, list[Cost]]:
    """Launcher -> its cost in every round."""
    (folder / "trivial.py").write_text(APP)
    (folder / "trivial.yaml").write_text("i: 0\n")
    found: dict[str, list[Cost]] = {name: [] for name in LAUNCHERS}
    for number in range(-1 if rounds > 1 else 0, rounds):
        names = list(LAUNCHERS)
        random.Random(number).shuffle(names)
        for name in names:
            # Round -1 fills caches, bytecode among them: a few jobs do. One round has none.
            jobs = f"i=range({num_jobs if number >= 0 else 2})"
            where = folder / f"{name}_{number}"
            command = [sys.executable, "trivial.py", "-m", *LAUNCHERS[name], jobs]
            cost = run([*command, f"hydra.sweep.dir={where}"], folder)
            if number >= 0:
                found[name].append(cost)
    return found


def measure_pieces(folder: Path, rounds: int) -> dict[str, list[Cost]]:
    """Piece of a job -> its cost in every round; three times as many, they are short."""
    job = folder / "local_0" / "0"
    assert (forge_dir(job) / STATE).exists()
    python = sys.executable
    single = [python, "trivial.py", "-m", *LAUNCHERS["local"], "i=0"]
    commands = {
        "interpreter": [python, "-c", "pass"],
        "interpreter, -S -E -s": [python, *_WRAPPER, "-c", "pass"],
        "wrapper's imports": [python, *_WRAPPER, "-c", WRAPPER_IMPORTS],
        "task's imports": [python, "-c", TASK_IMPORTS],
        "task's reading": [python, "-c", TASK_READS, str(job)],
        "launcher's imports": [python, "-c", LAUNCHER_IMPORTS],
        "job": [python, *_WRAPPER, "-c", _START, str(job)],
        "sweep of one": [*single, f"hydra.sweep.dir={folder / 'one'}"],
    }
    found: dict[str, list[Cost]] = {name: [] for name in commands}
    for number in range(-1, 3 * rounds) if rounds > 1 else (0,):
        names = list(commands)
        random.Random(number).shuffle(names)
        for name in names:
            if name == "sweep of one":  # in a directory of its own: a finished job is not run again
                commands[name][-1] = f"hydra.sweep.dir={folder / f'one_{number}'}"
            if name == "job":
                (forge_dir(job) / STATE).unlink()  # else it is finished, and does nothing
            cost = run(commands[name], folder)
            if name == "job":
                state = read_json(forge_dir(job) / STATE)
                assert state is not None
                assert state["state"] == "finished", state
            if number >= 0:
                found[name].append(cost)
    return found


def show_breakdown(pieces: dict[str, list[Cost]]) -> None:
    """Where the time of one job goes."""
    wall = {name: 1000 * median(found, "wall_s") for name, found in pieces.items()}
    cpu = {name: 1000 * median(found, "cpu_s") for name, found in pieces.items()}

    def row(text: str, *names: str) -> None:
        """The first piece less the others."""
        values = (of[names[0]] - sum(of[name] for name in names[1:]) for of in (wall, cpu))
        print(f"{text:62}" + "".join(f"{value:9.0f}" for value in values))

    print(f"\n{'one job of hydra/launcher=local':62}{'wall ms':>9}{'CPU ms':>9}")
    row("its wrapper: interpreter without site", "interpreter, -S -E -s")
    row("its wrapper: forge.job.local imported", "wrapper's imports", "interpreter, -S -E -s")
    row("its task: interpreter", "interpreter")
    row("its task: Hydra and forge.launch.task imported", "task's imports", "interpreter")
    row("its task: script imported, config and function read", "task's reading", "task's imports")
    row(
        "the rest: fork, main in Hydra, result, ending",
        "job",
        "wrapper's imports",
        "task's reading",
    )
    row("the job, from its wrapper's start to its end", "job")
    row("a sweep of one such job", "sweep of one")
    row("  of it the launcher's interpreter and imports", "launcher's imports")
    row(
        "  of it composing, freezing, starting, collecting",
        "sweep of one",
        "launcher's imports",
        "job",
    )


if __name__ == "__main__":
    main()
