"""Runs a script that trains with Accelerate, and signals itself: strikes.py <script> JSON

    {"step 17": "TERM"}    in the 17th backward pass of this process
    {"eval 2": "USR1"}     in the 2nd batch of an evaluation
    {"save 1": "KILL"}     as a checkpoint of forge is about to get its name
    {"own 1": "KILL"}      as the Trainer is about to complete a checkpoint of its own
    {"step 3": "limit"}    does not signal, but takes until the time limit is near

The script is not changed: the parts of its libraries that it calls are. Each backward pass adds a
line with its loss to steps_<rank>.txt, and each place a line with its kind to places_<rank>.txt.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import accelerate
from transformers import TrainerState

RANK = os.environ.get("RANK", 0)
MARGIN_S = 10.0
"""Seconds of the default policy that a stop needs before the limit, without its save."""
_counts = {"step": 0, "eval": 0, "save": 0, "own": 0}
_places = Path(f"places_{RANK}.txt").absolute()


def reach(kind, at):
    _counts[kind] += 1
    with _places.open("a") as file:
        file.write(f"{kind}\n")
    name = at.get(f"{kind} {_counts[kind]}")
    if name == "limit":
        time.sleep(max(0.0, float(os.environ["FORGE_END_TIME"]) - MARGIN_S - time.time()))
    elif name is not None:
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def install(at):
    backward, gather = accelerate.Accelerator.backward, accelerate.Accelerator.gather_for_metrics
    rename, replace = os.rename, os.replace
    keep = TrainerState.save_to_json
    steps = Path(f"steps_{RANK}.txt").absolute()

    def struck_backward(self, loss, **options):
        with steps.open("a") as file:
            file.write(f"{loss.item()!r}\n")
        reach("step", at)
        backward(self, loss, **options)

    def struck_gather(self, *given, **options):
        reach("eval", at)
        return gather(self, *given, **options)

    def struck_keep(self, path):
        reach("own", at)
        keep(self, path)

    def struck(move):
        def moved(source, target, **options):
            if Path(target).name.startswith("step_"):
                reach("save", at)
            return move(source, target, **options)

        return moved

    accelerate.Accelerator.backward = struck_backward
    accelerate.Accelerator.gather_for_metrics = struck_gather
    TrainerState.save_to_json = struck_keep
    os.rename, os.replace = struck(rename), struck(replace)


if __name__ == "__main__":
    script, places = sys.argv[1:]
    install(json.loads(places))
    sys.argv = [script]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
