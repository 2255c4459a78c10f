"""From SIGTERM to a process that is gone: forge's stop, and torch.save with a normal exit.

    python benchmarks/stopping.py [--mib N] [--rounds N] [--dir FOLDER]

Both train the same model in the same loop, look at a flag between two steps, save, and leave so
that handlers of atexit and of logging still run, which is checked. Whole processes, interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent

_COMMON = """
import atexit, logging, os, signal, sys, time
folder, mib = sys.argv[1], int(sys.argv[2])
logging.basicConfig(filename=folder + "/log", level=logging.INFO)
atexit.register(lambda: open(folder + "/atexit", "w").close())
import torch
sys.path.insert(0, sys.argv[3])
from saving import Training
training = Training(mib)

def step(number):
    time.sleep(0.02)
    if number == 10:
        print("ready", flush=True)
"""

_TORCH = (
    _COMMON
    + """
wanted = []
signal.signal(signal.SIGTERM, lambda *_: wanted.append(1))
for number in range(10_000):
    step(number)
    if wanted:
        with open(folder + "/state.tmp", "wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder + "/state.tmp", folder + "/state.pt")
        logging.info("saved")
        sys.exit(143)
"""
)

_FORGE = (
    _COMMON
    + """
import forge
os.chdir(folder)
with forge.Run({"checkpoint": {"async_save": True}}, model=training.model,
               optimizer=training.optimizer) as run:
    run.on_stop(lambda: logging.info("saved"))
    for number in run.steps(10_000):
        step(number)
"""
)

SCRIPTS = {"forge": _FORGE, "torch.save and a normal exit": _TORCH}


def stop_ms(script: str, mib: int, folder: Path) -> float:
    """Start a process, signal it, and wait for its end."""
    folder.mkdir()
    command = [sys.executable, "-c", script, str(folder), str(mib), str(HERE)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path[1:]])}
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise SystemExit((folder / "errors").read_text())
    begin = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    took = 1000 * (time.perf_counter() - begin)
    process.stdout.close()
    if (
        code != 143
        or not (folder / "atexit").exists()
        or "saved" not in (folder / "log").read_text()
    ):
        raise SystemExit(f"exit code {code}: {(folder / 'errors').read_text()}")
    return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="From SIGTERM to gone.")
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for number in range(options.rounds):
        names = list(SCRIPTS)
        for name in names if number % 2 else names[::-1]:
            with tempfile.TemporaryDirectory(dir=options.dir) as folder:
                found[name].append(stop_ms(SCRIPTS[name], options.mib, Path(folder) / "job"))
    print(json.dumps({name: statistics.median(times) for name, times in found.items()}))


if __name__ == "__main__":
    main()
