"""A small training job for tests: every kind of loader, quick to run, bits easily compared.

    python small.py <dir> '{"steps": 40, "loader": "plain", "policy": {…}, …}'

Writes the final weights to <dir>/weights.pt. Keys of the JSON: see `DEFAULTS`.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import forge

DEFAULTS = {
    "steps": 40,
    "loader": "plain",
    "workers": 0,
    "start": "fork",  # how workers are started
    "augment": "none",  # none | random | seeded
    "dropout": 0.3,
    "accumulate": 1,
    "step_s": 0.0,
    "policy": {},
    "kill_at": {},  # step -> signal name: the job signals itself in this step, in attempt 1 only
    "hold": None,  # in this step the job waits for a stop, in attempt 1 only
    "bad_steps": [],  # steps whose loss is NaN
    "evaluate_every": 0,
    "evaluate_polls": 5,
    "evaluate_s": 0.0,
    "by_hand": False,  # the schedule is stepped by the loop, after the update
    "swaps": False,  # other weights for the evaluation, written through .data
    "scaler": False,
    "guard": False,
}


class Points(Dataset):
    """48 points of a fixed function, with noise drawn as the sample is read if asked for."""

    def __init__(self, augment):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(48, 6, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.augment = augment

    def __len__(self):
        return len(self.x)

    def __setstate__(self, state):
        """In a worker that is spawned: a thread of before forge is there, like those of NumPy."""
        self.__dict__.update(state)
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def __getitem__(self, index):
        noise = torch.randn(6) * 0.1 if self.augment else 0.0
        return self.x[index] + noise, self.y[index]


def make_loader(spec):
    dataset = Points(spec["augment"] != "none")
    if spec["augment"] == "seeded":
        dataset = forge.data.seeded(dataset, 3)
    options = {"batch_size": 5, "num_workers": spec["workers"]}
    if spec["workers"]:
        options["multiprocessing_context"] = spec["start"]
    if spec["loader"] == "generator":
        options["generator"] = torch.Generator().manual_seed(11)
    if spec["loader"] == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(dataset, shuffle=True, **options)
    if spec["loader"] == "persistent":
        options["persistent_workers"] = True
    if spec["loader"] == "sampler":
        return DataLoader(dataset, sampler=CountingSampler(len(dataset)), **options)
    if spec["loader"] == "replacement":
        sampler = RandomSampler(dataset, replacement=True, num_samples=40)
        return DataLoader(dataset, sampler=sampler, **options)
    if spec["loader"] == "list":
        return list(DataLoader(dataset, batch_size=5))
    if spec["loader"] == "own":
        return OwnLoader(dataset)
    return DataLoader(dataset, shuffle=True, **options)


class CountingSampler:
    """A sampler with a state of its own: each epoch's order depends on how many went before."""

    exact = True

    def __init__(self, size):
        self.size = size
        self.epochs = 0

    def __len__(self):
        return self.size

    def __iter__(self):
        self.epochs += 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epochs))
        return iter(order.tolist())

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class OwnLoader:
    """An iterable that knows its own place."""

    exact = True

    def __init__(self, dataset):
        self.dataset = dataset
        self.place = 0

    def __iter__(self):
        while self.place < 9:
            self.place += 1
            yield tuple(t.unsqueeze(0) for t in self.dataset[self.place])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def evaluate(model, run, spec):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(spec["evaluate_polls"]):
            total += model(torch.randn(4, 6)).sum().item()
            run.check_stop()
            time.sleep(spec["evaluate_s"])
    model.train()
    return total


def main(directory, spec):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    spec = DEFAULTS | spec
    policy = {"checkpoint": {"dir": str(directory / "checkpoints")}}
    for group, values in spec["policy"].items():
        policy[group] = policy.get(group, {}) | values if isinstance(values, dict) else values
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(spec["dropout"]),
        torch.nn.Linear(16, 1),
    )
    if spec["loader"] == "own":
        model[1] = torch.nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=spec["steps"] + 1)
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule}
    scaler = None
    if spec["scaler"]:
        scaler = stateful["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    loader = None if spec["loader"] == "none" else make_loader(spec)
    is_first = not (directory / "checkpoints").exists()
    with forge.Run(policy, **stateful) as run:

        def score(step):
            if spec["swaps"]:
                kept = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.mul_(0.5)
            run.log(held_out=evaluate(model, run, spec))
            if spec["swaps"]:
                for p, was in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(was)

        if spec["evaluate_every"]:
            run.every(spec["evaluate_every"])(score)
        for item in run.steps(spec["steps"], loader):
            step, (x, y) = (
                item if loader is not None else (item, (torch.randn(5, 6), torch.ones(5, 1)))
            )
            if is_first and str(step) in spec["kill_at"]:
                os.kill(os.getpid(), signal.Signals["SIG" + spec["kill_at"][str(step)]])
            while is_first and step == spec["hold"] and not run.is_stopping:
                time.sleep(0.01)
            loss = (model(x) - y).square().mean()
            if step in spec["bad_steps"]:
                loss = loss * float("nan")
            (scaler.scale(loss) if scaler else loss).backward()
            if (step + 1) % spec["accumulate"] == 0:
                if spec["guard"]:
                    if run.should_step(loss):
                        optimizer.step()
                        schedule.step()
                    optimizer.zero_grad()
                else:
                    given = None if spec["by_hand"] else schedule
                    run.update(loss, optimizer, given, scaler=scaler, clip_norm=1.0)
                    if spec["by_hand"]:
                        schedule.step()
            run.log(loss=loss)
            time.sleep(spec["step_s"])
    torch.save(model.state_dict(), directory / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
