"""What the end of a process costs that has trained with torch: the limit below stopping.py.

    python benchmarks/ending.py [--rounds N]

From the last atexit handler to the process gone, by:
  normal       the interpreter takes everything down, object by object
  frozen       objects in cycles stay as they are (`gc.freeze`), as after a stop of forge
  exit         the interpreter stays as it is; C's `exit` runs the handlers of libraries
  _exit        nothing more runs: what a library flushes at exit (HDF5, profilers, MPI) is lost
Whole processes, interleaved; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

ENDS = {
    "normal": "",
    "frozen": "gc.freeze()",
    "exit": "ctypes.PyDLL(None).exit(0)",
    "_exit": "os._exit(0)",
}

_SCRIPT = """
import atexit, ctypes, gc, os, sys
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()

def last():
    print("ready", flush=True)
    sys.stdin.read(1)
    {end}

atexit.register(last)
"""


def end_ms(end: str) -> float:
    """Run a process up to its last handler, let it go, and wait until it is gone."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT.format(end=end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise SystemExit(f"exit code {process.wait()}")
    begin = time.perf_counter()
    process.stdin.close()
    process.wait()
    took = 1000 * (time.perf_counter() - begin)
    process.stdout.close()
    return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the end of a process costs.")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in ENDS}
    for number in range(options.rounds):
        names = list(ENDS)
        for name in names if number % 2 else names[::-1]:
            found[name].append(end_ms(ENDS[name]))
    print(json.dumps({name: statistics.median(times) for name, times in found.items()}))


if __name__ == "__main__":
    main()
