"""How long `forge status` takes for a large sweep, beside reading all of its files.

    python benchmarks/status.py [--jobs N] [--steps N] [--rounds N]

Three real jobs train: one finishes, one raises, one is killed. Their directories are copied until
the sweep has the jobs wanted. `naive` reads and decodes every small file of every job, as a script
of one's own would. Cold: no file is in the page cache. While it changes: another
process appends to ledgers and replaces states meanwhile. Interpreters and imports are included.
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
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN = """
import os
import hydra
import torch
import forge

@hydra.main(version_base=None, config_path=".", config_name="conf")
def main(cfg):
    model = torch.nn.Linear(2, 2)
    with forge.Run(cfg.resilience, model=model) as run:
        for step in run.steps(cfg.steps):
            run.log(loss=1 / (step + 1))
            if cfg.end == "raises" and step == cfg.steps - 2:
                raise ValueError("no such luck")
            if cfg.end == "killed" and step == cfg.steps - 2:
                os.kill(os.getpid(), 9)

main()
"""
CONF = """
defaults: [{resilience: default}, _self_]
steps: 1000
end: finishes
seed: 0
resilience:
  checkpoint: {every_steps: 50, every_s: null}
  requeue: {max_failures: 0}
"""
NAIVE = """
import json, sys
from pathlib import Path
for path in Path(sys.argv[1]).rglob("*"):
    if path.suffix in (".json", ".jsonl") and path.is_file():
        for line in path.read_text(errors="replace").split("\\n"):
            try:
                json.loads(line)
            except ValueError:
                pass
"""
WRITER = """
import json, random, sys, time
from pathlib import Path
jobs = [one for one in Path(sys.argv[1]).iterdir() if one.name.isdigit()]
while True:
    job = random.choice(jobs)
    state = job / ".forge" / "state.json"
    new = state.with_suffix(".new")
    new.write_bytes(state.read_bytes())
    new.replace(state)
    event = {"kind": "metrics", "t": time.time(), "step": 1, "loss": 0.5}
    for path in job.rglob("attempt_*.jsonl"):
        with path.open("a") as file:
            file.write(json.dumps(event) + "\\n")
    time.sleep(0.002)
"""
ENDS = ("finishes", "raises", "killed")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long `forge status` takes.")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000, help="an event for each, at least")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sweep = make(Path(folder), options.jobs, options.steps)
        small = [path for path in sweep.rglob("*.json*") if path.is_file()]
        lines = sum(path.read_bytes().count(b"\n") for path in sweep.rglob("attempt_*.jsonl"))
        print(
            f"{options.jobs} jobs, {lines} events, {len(small)} small files of"
            f" {sum(path.stat().st_size for path in small) / 2**20:.0f} MiB"
        )
        report(measure(sweep, options.rounds))


def make(folder: Path, num_jobs: int, num_steps: int) -> Path:
    """A sweep of copies of three real jobs."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "conf.yaml").write_text(CONF)
    sweep = folder / "sweep"
    command = [sys.executable, "train.py", "-m", "hydra/launcher=local", f"steps={num_steps}"]
    command += [f"end={','.join(ENDS)}", f"hydra.sweep.dir={sweep}"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    index = sweep / ".forge" / "jobs.jsonl"
    first = json.loads(index.read_text().strip().splitlines()[0])
    entries = []
    for number in range(num_jobs):
        end = ENDS[number % len(ENDS)]
        if number >= len(ENDS):
            shutil.copytree(sweep / str(number % len(ENDS)), sweep / str(number), symlinks=True)
        overrides = [f"steps={num_steps}", f"end={end}", f"seed={number}"]
        entries.append(first | {"number": number, "subdir": str(number), "overrides": overrides})
    index.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return sweep


def measure(sweep: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant and round."""
    status = [sys.executable, "-m", "forge", "status", str(sweep)]
    naive = [sys.executable, "-c", NAIVE, str(sweep)]
    variants = {
        "forge status, warm": (status, False, False),
        "forge status, cold": (status, True, False),
        "forge status, while it changes": (status, False, True),
        "naive, warm": (naive, False, False),
        "naive, cold": (naive, True, False),
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            command, is_cold, is_changing = variants[name]
            if is_cold:
                forget(sweep)
            writer = None
            if is_changing:
                writer = subprocess.Popen([sys.executable, "-c", WRITER, str(sweep)])
            began = time.monotonic()
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
            found[name].append(time.monotonic() - began)
            if writer is not None:
                writer.kill()
                writer.wait()
            if done.returncode:
                sys.exit(f"{name}: {done.stderr.decode()}")
    return found


def forget(sweep: Path) -> None:
    """Drop all files of a sweep from the page cache."""
    for path in sweep.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def report(found: dict[str, list[float]]) -> None:
    """Print the medians."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"medians of {len(next(iter(found.values())))} interleaved rounds\n")
    for name, seconds in medians.items():
        peer = medians[f"naive, {'cold' if 'cold' in name else 'warm'}"]
        print(f"{name:34} {seconds:7.2f} s   {seconds / peer:5.2f} x naive")


if __name__ == "__main__":
    main()
