"""A training without forge: no torch, no Hydra, its own checkpoints.

forge exec --config-dir examples/conf --config-name command lr=0.1,0.2 seed=1,2
"""

import argparse
import os
import pickle
import random
import signal
import time
from pathlib import Path


def main() -> None:
    """Fit a line to random points; save on SIGTERM, and resume from the saved state."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    checkpoint = given.out / "checkpoint.pkl"
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))

    rng = random.Random(given.seed)
    step, slope, offset = 0, 0.0, 0.0
    if checkpoint.exists():
        step, slope, offset, drawn = pickle.loads(checkpoint.read_bytes())
        rng.setstate(drawn)
    print(f"starts at step {step}", flush=True)
    while step < given.steps and not leaving:
        x = rng.uniform(-1, 1)
        error = slope * x + offset - (2 * x + 1 + rng.gauss(0, 0.1))
        slope, offset = slope - given.lr * error * x, offset - given.lr * error
        step += 1
        time.sleep(given.step_s)
    new = checkpoint.with_suffix(".new")
    new.write_bytes(pickle.dumps((step, slope, offset, rng.getstate())))
    os.replace(new, checkpoint)
    if step < given.steps:
        print(f"saved step {step}")
        raise SystemExit(75)  # checkpointed: run me again
    (given.out / "line.txt").write_text(f"{slope.hex()} {offset.hex()}\n")
    print(f"y = {slope:.3f} x + {offset:.3f}")


if __name__ == "__main__":
    main()
