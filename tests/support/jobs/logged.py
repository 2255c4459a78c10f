"""A training whose loggers are named by its arguments, and that signals itself.

    python logged.py <dir> '{"loggers": ["CSV"], "bad_steps": [], "policy": {…}}'

With HIT="37 SIGKILL" it sends itself the signal in that step, once each logger has got something of
this attempt (offline, Weights & Biases shows nothing before its end).
"""

import os
import select
import signal
import sys
from pathlib import Path

import torch
from bench import play_arguments

sys.path.append(str(Path(__file__).parents[1]))
from logged_values import READERS

import forge
from forge.training import metrics

STEPS, EVERY = 60, 20


def logger_of(kind, directory):
    options = {
        "WandB": {"project": "tests", "mode": "offline"},
        "MLflow": {"experiment": "tests", "tracking_uri": f"file://{directory}/mlruns"},
    }
    return getattr(forge.loggers, kind)(**options.get(kind, {}))


def main(directory, spec):
    metrics._MAX_AGE_S = 0.0  # the ledger has each step at the next boundary
    torch.set_num_threads(1)
    torch.manual_seed(5)
    job = directory / "checkpoints"
    policy = {
        "checkpoint": {"dir": str(job), "every_steps": EVERY, "every_s": None, "keep_last": 9}
    }
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hit, name = os.environ.get("HIT", "-1 SIGKILL").split()
    with forge.Run(policy | spec.get("policy", {}), model=model, optimizer=optimizer) as run:
        run.log_to(*(logger_of(kind, job) for kind in spec["loggers"]))

        @run.every(7)
        def held_out(step):
            run.log(held_out=model.weight.detach().sum())

        for step in run.steps(STEPS):
            loss = model(torch.randn(4, 3)).square().mean()
            bad = directory / f"bad_{step}"
            if step in spec.get("bad_steps", []) and not bad.exists():
                wait_for_loggers(spec["loggers"], job, run.resumed_from)
                bad.touch()
                loss = loss * float("nan")
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
            if step == int(hit):
                wait_for_loggers(spec["loggers"], job, run.resumed_from)
                os.kill(os.getpid(), getattr(signal, name))
                signal.pause() if name == "SIGKILL" else None


def wait_for_loggers(kinds, job, resumed_from):
    """Until each has got a value of this attempt."""
    begin = int((resumed_from or "step_0").removeprefix("step_"))
    for kind in set(kinds) - {"WandB"}:
        while not any(step >= begin for (step, _), _ in READERS[kind](job)):
            select.select([], [], [], 0.01)


if __name__ == "__main__":
    play_arguments(main)
