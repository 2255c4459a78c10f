"""The cost of heartbeats for a training, and of hang detection for its supervisor.

    python benchmarks/progress_marks.py [--pairs N] [--steps N] [--seconds S] [--calls N]

A tiny loop runs as a job of `hydra/launcher=local`, once with `resilience.hang.action=warn` and
once with `ignore`, which switches both off. The pairs are interleaved, and their order alternates.
Each job runs a number of steps as fast as possible, to measure the CPU time of a step, and then ten
steps a second for some seconds, to measure wake-ups. It measures itself with getrusage, and its
parent, the supervisor, through /proc. It prints medians, and the median of the differences within
the pairs.

Then it prints the time of each call in nanoseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.config.schema import HangConfig
from forge.process.progress import HeartbeatPage, HeartbeatWriter, Phase
from forge.process.sections import Sections

_APP = """
import json, os, resource, time
from pathlib import Path
import hydra
import torch
import forge
from forge.jobdir.job_files import PROGRESS

TICK_S = 1 / os.sysconf("SC_CLK_TCK")

def own():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), used.ru_nvcsw

def supervisor():
    folder = Path("/proc", str(os.getppid()))
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    lines = [t.read_text().splitlines() for t in folder.glob("task/*/status")]
    switches = [int(l.split()[1]) for one in lines for l in one if l.startswith("voluntary_")]
    return (int(stat[11]) + int(stat[12])) * TICK_S, sum(switches)

def since(before, now, share):
    return [(b - a) / share for a, b in zip(before, now)]

@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    data = torch.randn(64, 16)
    warm, paced = 500, 500 + cfg.num_steps
    with forge.Run(cfg.resilience, model=model, optimizer=optimizer) as run:
        is_marked = PROGRESS in os.environ
        for step in run.steps(paced + int(10 * cfg.seconds)):
            if step == warm:
                began = own()
            if step == paced:
                a_step = since(began, own(), cfg.num_steps)[0]
                quiet, quiet_supervisor, at = own(), supervisor(), time.monotonic()
            if step >= paced:
                time.sleep(0.1)
            loss = model(data).square().mean()
            loss.backward()
            run.update(loss, optimizer, clip_norm=1.0)
        seconds = time.monotonic() - at
        found = {
            "is_marked": is_marked,
            "step_us": a_step * 1e6,
            "task": since(quiet, own(), seconds),
            "supervisor": since(quiet_supervisor, supervisor(), seconds),
        }
    Path(cfg.found).write_text(json.dumps(found))

main()
"""

_CONFIG = """
defaults:
  - resilience: default
  - _self_
num_steps: 1000
seconds: 5
found: ???
"""

ROWS: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "task: CPU of a step": ("µs", lambda one: one["step_us"]),
    "task, 10 steps a second: CPU": ("ms/s", lambda one: one["task"][0] * 1e3),
    "task, 10 steps a second: wake-ups": ("1/s", lambda one: one["task"][1]),
    "supervisor: CPU": ("ms/s", lambda one: one["supervisor"][0] * 1e3),
    "supervisor: wake-ups": ("1/s", lambda one: one["supervisor"][1]),
}


def job(folder: Path, action: str, *, num_steps: int, seconds: float) -> dict[str, Any]:
    """The measurements of one job."""
    folder.mkdir()
    (folder / "train.py").write_text(_APP)
    (folder / "config.yaml").write_text(_CONFIG)
    found = folder / "found.json"
    overrides = [f"num_steps={num_steps}", f"seconds={seconds}", f"found={found}"]
    overrides.append(f"resilience.hang.action={action}")
    done = subprocess.run(
        [sys.executable, "train.py", "-m", "hydra/launcher=local", *overrides],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"a job has failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(found.read_text())
    return result


def calls(count: int) -> None:
    """Print the time of each call: the best of five averages over `count` calls."""
    page = HeartbeatPage.create()
    marks = HeartbeatWriter.open(page.environ)
    marked, unmarked = Sections(HangConfig(), marks), Sections(HangConfig(), HeartbeatWriter())
    marked.begin_step()

    def inside(one: Sections) -> None:
        with one.inside(Phase.collective):
            pass

    for name, call in {
        "a mark": lambda: marks.enter(Phase.step, 1, 300.0),
        "a step": marked.begin_step,
        "a step, not watched": unmarked.begin_step,
        "bytes written, in another section": lambda: marked.advance(Phase.save),
        "progress in its section": lambda: marked.advance(Phase.step),
        "a section, entered and left": lambda: inside(marked),
        "the same, not watched": lambda: inside(unmarked),
        "a look at the page": page.read,
    }.items():
        found = min(timeit.repeat(call, number=count, repeat=5)) / count
        print(f"{name:36} {found * 1e9:8.0f} ns")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_000, help="of each job, without a pause")
    parser.add_argument("--seconds", type=float, default=20.0, help="of ten steps a second")
    parser.add_argument("--calls", type=int, default=200_000, help="of each function")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"warn": [], "ignore": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(options.pairs):
            for action in sorted(found, reverse=bool(pair % 2)):
                place = Path(folder, f"{pair}_{action}")
                given = {"num_steps": options.steps, "seconds": options.seconds}
                found[action].append(job(place, action, **given))
    if not all(one["is_marked"] for one in found["warn"]):
        print("The supervisor has made no page: nothing was marked in either.\n")
    print(f"{'':36} {'without':>9} {'with':>9} {'adds':>9}")
    for name, (unit, value) in ROWS.items():
        without, marked = ([value(one) for one in found[action]] for action in ("ignore", "warn"))
        adds = statistics.median(b - a for a, b in zip(without, marked, strict=True))
        medians = f"{statistics.median(without):9.2f} {statistics.median(marked):9.2f}"
        print(f"{name:36} {medians} {adds:9.2f} {unit}")
    print()
    calls(options.calls)


if __name__ == "__main__":
    main()
