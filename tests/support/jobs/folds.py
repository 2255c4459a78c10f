"""A script with several Runs, one after the other: python folds.py <dir> '{"folds": 3, …}'

Nothing is seeded between the folds: each begins with the random state that the one before it left.
Writes all final weights and scores to <dir>/weights.pt. Keys of the JSON: see `DEFAULTS`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import forge
from forge.loggers import Logger


class Uploading(Logger):
    """A logger that this signal meets in its last upload."""

    def __init__(self, number):
        self.number = number

    def on_resume(self, step):
        return step

    def write(self, rows):
        pass

    def close(self, is_finished):
        os.kill(os.getpid(), self.number)


DEFAULTS = {
    "folds": 3,
    "steps": 8,
    "by": "name",  # name | dir | nothing: what tells the folds apart
    "nests": False,  # whether a Run is tried inside each one
    "kill_at": {},  # attempt -> [fold, step or "end", signal name]: the script signals itself
}


def main(directory, spec):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    spec = DEFAULTS | spec
    tries = directory / "tries"
    tries.mkdir(exist_ok=True)
    attempt = len(list(tries.iterdir())) + 1
    (tries / str(attempt)).touch()
    kill = spec["kill_at"].get(str(attempt))
    result = {}
    for fold in range(spec["folds"]):
        where = directory / "checkpoints"
        named = {"name": f"fold{fold}"} if spec["by"] == "name" else {}
        if spec["by"] == "dir":
            where = directory / f"fold{fold}"
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        policy = {"checkpoint": {"dir": str(where), "every_steps": 3, "every_s": None}}
        with forge.Run(policy, **named, model=model, optimizer=optimizer) as run:
            if kill is not None and kill[:2] == [fold, "end"]:
                run.log_to(Uploading(signal.Signals[f"SIG{kill[2]}"]))
            for step in run.steps(spec["steps"]):
                if spec["nests"] and step == 2:
                    try:
                        with forge.Run({"checkpoint": {"dir": str(directory / "inner")}}):
                            print("inside")
                    except SystemExit as error:
                        print(f"refused with {error.code}")
                if kill is not None and kill[:2] == [fold, step]:
                    os.kill(os.getpid(), signal.Signals[f"SIG{kill[2]}"])
                loss = (model(torch.randn(3, 4)) - fold).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
            run.log(held_out=model(torch.randn(3, 4)).mean())
        result |= {f"{fold}.{name}": value for name, value in model.state_dict().items()}
        result[f"{fold}.score"] = model(torch.randn(3, 4)).detach()
    torch.save(result, directory / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
