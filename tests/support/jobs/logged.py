"""A training whose loggers are named by its arguments, and that signals itself.

    python logged.py <dir> '{"loggers": ["CSV"], "bad_steps": [], "policy": {…}}'

With HIT="37 SIGKILL" it sends itself the signal in that step, with "evaluation_35 SIGTERM" in the
evaluation before step 35, once each logger has got something of this attempt (Weights & Biases,
which shows little before its end, only has to have begun).
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
    place, name = os.environ.get("HIT", "nowhere SIGKILL").split()
    num_offline = len(offline(job))

    def reach(reached, begin):
        if reached == place:
            for kind in spec["loggers"]:
                while not has_got(kind, job, begin, num_offline):
                    select.select([], [], [], 0.01)
            os.kill(os.getpid(), getattr(signal, name))
            signal.pause() if name == "SIGKILL" else None

    with forge.Run(policy | spec.get("policy", {}), model=model, optimizer=optimizer) as run:
        run.log_to(*(logger_of(kind, job) for kind in spec["loggers"]))
        begin = int((run.resumed_from or "step_0").removeprefix("step_"))

        @run.every(7)
        def held_out(step):
            reach(f"evaluation_{step}", begin)
            run.check_stop()
            run.log(held_out=model.weight.detach().sum())

        for step in run.steps(STEPS):
            loss = model(torch.randn(4, 3)).square().mean()
            bad = directory / f"bad_{step}"
            if step in spec.get("bad_steps", []) and not bad.exists():
                bad.touch()
                loss = loss * float("nan")
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss, step=step // EVERY)  # as people name an epoch for Lightning
            reach(str(step), begin)


def offline(job):
    return list(job.glob("wandb/offline-run-*"))


def has_got(kind, job, begin, num_offline):
    """Whether it has a value of this attempt."""
    if kind == "WandB":
        return len(offline(job)) > num_offline
    return any(step >= begin for (step, _), _ in READERS[kind](job))


if __name__ == "__main__":
    play_arguments(main)
