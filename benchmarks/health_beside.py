"""What the health checks cost a training: at its start, and beside it.

    python benchmarks/health_beside.py [--rounds N] [--seconds S]

A tiny loop of ten steps a second runs in processes of its own: with the checks every second, at
their default interval, and without them; interleaved, and each round in another order. CPU time and
wake-ups (voluntary context switches) are getrusage's, of the process and of the children that it
has collected, from the first step on. Medians are printed, with the median of the differences to
the run without checks in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

_RUN = """
import json, resource, sys, time
import torch
import forge
from forge.health.attempt import Health

health, seconds, folder = json.loads(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model, data = torch.nn.Linear(16, 1), torch.randn(64, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
start_s = 0.0

def timed(check):
    def call(self):
        global start_s
        began = time.perf_counter()
        check(self)
        start_s += time.perf_counter() - began
    return call

Health.check_node, Health.check_ranks = timed(Health.check_node), timed(Health.check_ranks)

def used():
    own, others = (resource.getrusage(who) for who in (0, resource.RUSAGE_CHILDREN))
    return [sum(one.ru_utime + one.ru_stime for one in (own, others)), own.ru_nvcsw]

policy = {"checkpoint": {"dir": folder, "every_s": None, "every_steps": None}, "health": health}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for step in run.steps(20 + int(10 * seconds)):
        if step == 20:
            before, at = used(), time.monotonic()
        model(data).square().mean().backward()
        optimizer.step()
        time.sleep(0.1)
    took_s = time.monotonic() - at
    found = [(b - a) / took_s for a, b in zip(before, used())]
print(json.dumps([start_s * 1e3, found[0] * 1e3, found[1]]))
"""

WITHOUT = "health.enabled=false"
POLICIES: dict[str, dict[str, Any]] = {
    WITHOUT: {"enabled": False},
    "health.every_s=300": {"every_s": 300.0},
    "health.every_s=1": {"every_s": 1.0},
}
ROWS = (
    "all checks at the start: ms",
    "beside training: CPU, ms/s",
    "beside training: wake-ups, 1/s",
)


def measured(health: dict[str, Any], seconds: float) -> list[float]:
    """What one training has measured, in the order of the rows."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _RUN, json.dumps(health), str(seconds), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"a training has failed:\n{done.stdout}{done.stderr}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of ten steps a second")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {name: [] for name in POLICIES}
    names = list(POLICIES)
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(measured(POLICIES[name], options.seconds))
    print(f"{'':32} {'':20} {'median':>8} {'adds':>8}")
    for row, title in enumerate(ROWS):
        for name in names:
            values = [one[row] for one in found[name]]
            without = [one[row] for one in found[WITHOUT]]
            adds = statistics.median(a - b for a, b in zip(values, without, strict=True))
            print(f"{title:32} {name:20} {statistics.median(values):8.2f} {adds:8.2f}")


if __name__ == "__main__":
    main()
