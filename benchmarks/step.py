"""What forge adds to each training step of a tiny model, in microseconds of CPU, part by part.

    python benchmarks/step.py [--steps N] [--rounds N]

Every loop is a process of its own with one thread. They take turns, a few hundred steps each, so
that a busy machine slows all of them; of each, the median over the rounds is printed, and its
distance from the loop that does the same without forge:

    plain          backward, optimizer.step, zero_grad
    + isfinite     reads the loss, and looks whether it is finite
    + clip         clips by the norm of the gradients, too
    forge off      forge.Run with `enabled: false`: run.update(loss, optimizer, clip_norm=1.0)
    forge          the same, enabled: signals, saves, the NaN policy
    forge + log    run.log(loss=loss) as well
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping

_TRAINING = """
import math, sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
kind, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
data = torch.randn(64, 16)

def wait():
    # CPU seconds of the steps since the last turn, then until the next turn.
    global began
    print("CPU", time.process_time() - began, flush=True)
    sys.stdin.readline() or sys.exit()
    began = time.process_time()

def loss_of(step):
    if step % count == 0:
        wait()
    return model(data).square().mean()

began = time.process_time()
if kind.startswith("forge"):
    import forge
    policy = {"enabled": kind != "forge off", "checkpoint": {"dir": folder + "/checkpoints"}}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(10**9):
            loss = loss_of(step)
            loss.backward()
            run.update(loss, optimizer, clip_norm=1.0)
            if kind == "forge + log":
                run.log(loss=loss)
for step in range(10**9):
    loss = loss_of(step)
    loss.backward()
    if kind != "plain" and not math.isfinite(loss.item()):
        break
    if kind == "+ clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

BESIDE = {
    "plain": None,
    "+ isfinite": "plain",
    "+ clip": "+ isfinite",
    "forge off": "+ clip",
    "forge": "+ clip",
    "forge + log": "forge",
}
"""Each loop, and the one that it is compared with."""


class Loop:
    """A training process that does some steps whenever it is asked."""

    def __init__(self, training: str, kind: str, num_steps: int, folder: str) -> None:
        os.makedirs(folder)
        self._num_steps = num_steps
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", training, kind, str(num_steps), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._read()

    def _read(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("CPU "):  # libraries print, too
                return float(line[4:])
        raise SystemExit(f"a training loop ended with {self._process.wait()}")

    def turn(self) -> float:
        """Microseconds of CPU that one step took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read() / self._num_steps * 1e6

    def end(self) -> None:
        """The process is gone afterwards."""
        self._process.kill()
        self._process.wait()


def measured(
    training: str, kinds: Iterable[str], num_steps: int, rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """(kind of loop, its microseconds in each round)."""
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            kind: Loop(training, kind, num_steps, f"{folder}/{number}")
            for number, kind in enumerate(kinds)
        }
        try:
            for loop in loops.values():
                loop.turn()  # caches fill
            taken = [{kind: loop.turn() for kind, loop in loops.items()} for _ in range(rounds)]
        finally:
            for loop in loops.values():
                loop.end()
    for kind in kinds:
        yield kind, [one[kind] for one in taken]


def compare(
    about: str | None, training: str, all_beside: Mapping[str, str | None], steps: int
) -> None:
    """Measure and print.

    Args:
        about: The description of the program.
        training: Python code of a process that trains.
        all_beside: Each loop, and the one that it is compared with.
        steps: Default for the steps of one turn.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=steps, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    print(f"{'':18} {'µs a step':>10} {'adds':>7}   beside")
    medians: dict[str, float] = {}
    for kind, taken in measured(training, all_beside, options.steps, options.rounds):
        medians[kind] = statistics.median(taken)
        beside = all_beside[kind]
        adds = f"{medians[kind] - medians[beside]:7.1f}   {beside}" if beside else ""
        print(f"{kind:18} {medians[kind]:10.1f} {adds}")


if __name__ == "__main__":
    compare(__doc__, _TRAINING, BESIDE, 500)
