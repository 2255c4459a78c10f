"""A job that waits, in a stage of one's choice, until it is signalled.

    python stages.py <dir> '{"stage": "loop", …}'

It touches <dir>/ready once it is there. Stages: imports, building, loop, c_call, gil_free_c_call,
evaluation, last_step, after. In loop and last_step it waits for a stop or for <dir>/go. What it
does on a stop is appended to <dir>/events.txt.
"""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

directory = Path(sys.argv[1])
spec = {"stage": "loop", "policy": {}, "steps": 5} | json.loads(sys.argv[2])
stage = spec["stage"]


def note(text):
    with (directory / "events.txt").open("a") as file:
        file.write(text + "\n")


def arrive():
    (directory / "ready").touch()


def linger(seconds=60):
    """In the main thread, a bytecode at a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def stay(run):
    """In the main thread until a stop is asked for, or the test lets it go."""
    while not (run.is_stopping or (directory / "go").exists()):
        time.sleep(0.01)


def sleep_for_ever():
    time.sleep(600)


if stage == "imports":
    arrive()
    linger()

import torch  # noqa: E402

import forge  # noqa: E402

IGNORE = """
import signal, time
for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
"""


def start_helpers():
    """Children of every kind that a training script has."""
    kept = []
    if "stubborn" in spec.get("children", ()):
        child = subprocess.Popen([sys.executable, "-c", IGNORE], stdout=subprocess.PIPE)
        child.stdout.readline()
        kept.append(child)
    if "processes" in spec.get("children", ()):
        pool = ProcessPoolExecutor(2)
        kept.append([pool.submit(sleep_for_ever), pool.submit(sleep_for_ever)])
        kept.append(pool)
    if "threads" in spec.get("children", ()):
        pool = ThreadPoolExecutor(1)
        kept.append(pool.submit(linger, 8))
    if "thread" in spec.get("children", ()):
        threading.Thread(target=linger, args=(120,)).start()
    return kept


def callbacks(register):
    register(lambda: note("callback first"))

    def fails():
        note("callback fails")
        raise ValueError("a callback's own bug")

    register(fails)
    register(lambda: note("callback last"))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = start_helpers()
    if "early_callbacks" in spec:
        callbacks(forge.on_stop)
    model = torch.nn.Linear(4, 1)
    if stage == "building":
        try:
            arrive()  # inside: the signal may come before the next line
            linger()
        finally:
            note("finally")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {"checkpoint": {"dir": str(directory / "checkpoints")}} | spec["policy"]
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        if "callbacks" in spec:
            callbacks(run.on_stop)
        if stage == "evaluation":

            @run.every(spec.get("at", 2))
            def evaluate(step):
                arrive()
                while not run.check_stop():
                    time.sleep(0.01)

        try:
            for step in run.steps(spec["steps"]):
                loss = model(torch.randn(3, 4)).sum()
                loss.backward()
                run.update(loss, optimizer)
                if step == spec.get("at", 2):
                    if stage in ("loop", "last_step"):
                        arrive()
                        linger(spec["linger_s"]) if "linger_s" in spec else stay(run)
                    if stage == "c_call":
                        arrive()
                        time.sleep(spec.get("linger_s", 60))
        finally:
            note("finally in with")
    note("after")
    if stage == "after":
        arrive()
        linger()
    del kept
    os.write(1, b"done\n")


if __name__ == "__main__":
    main()
