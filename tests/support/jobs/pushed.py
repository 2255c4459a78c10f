"""A trainer that owns its loop, and calls `run.boundary` between two steps.

Drop-out, accumulated gradients, a plateau schedule on the mean of an epoch, and data that draws.
With `reads_ahead` it takes the next batch before it trains on this one (`ahead`: forge knows it);
with `limit` it leaves each pass after so many batches; with `begins` it draws between making an
iterator and reading it; with `takes_signals` it ignores signals.
"""

import json
import signal

import torch
from bench import DATA, play, play_arguments
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import forge

EPOCHS = 3


class Drawing(Dataset):
    """Noise on each item, drawn as it is read."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        x, y = DATA[index]
        return x + 0.01 * torch.randn(6), y


class Counters:
    """The trainer's counters, which no other object saves."""

    def __init__(self):
        self.batches = self.epoch = 0
        self.losses = []

    def state_dict(self):
        return {"batches": self.batches, "epoch": self.epoch, "losses": list(self.losses)}

    def load_state_dict(self, state):
        self.batches, self.epoch, self.losses = state["batches"], state["epoch"], state["losses"]


def ahead(loader):
    """Fetches one batch ahead, like Accelerate's DataLoaderShard."""
    batches = iter(loader)
    now = next(batches, None)
    while now is not None:
        coming = next(batches, None)
        yield now
        now = coming


def left_of(loader, limit, counters):
    """The batches of this epoch that are left, after a resume too."""
    if len(counters.losses) < limit:
        for batch in loader:
            yield batch
            if len(counters.losses) == limit:
                return


LOADERS = {
    "plain": DataLoader,
    "stateful": StatefulDataLoader,
    "distributed": lambda data, *_, **__: DataLoader(
        data, 5, sampler=DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    ),
    "list": lambda *_, **__: [DATA[i : i + 5] for i in range(0, 50, 5)],
}


def trainer(bench):
    counters, spec = Counters(), bench.spec
    make = LOADERS[spec.get("kind", "plain")]
    options = {"persistent_workers": True} if spec.get("persistent") else {}
    data = DATA if spec.get("persistent") else Drawing()
    loader = make(data, 5, shuffle=True, num_workers=spec.get("workers", 0), **options)
    loader = forge.data.resumable(loader, ahead=spec.get("ahead", 0))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(bench.optimizer, patience=0)
    with bench.run(trainer=counters, loader=loader, schedule=schedule) as run:

        @run.every(7, at_end=True)
        def held_out(step):
            run.log(held_out=bench.evaluate())

        bench.optimizer.zero_grad()  # as Lightning does, after everything was restored
        if spec.get("takes_signals"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, lambda number, frame: None)
        start = run.begin()
        with (bench.directory / "starts.txt").open("a") as file:
            file.write(json.dumps(start) + "\n")
        limit = spec.get("limit", 1000)
        while not start.is_finished and counters.epoch < EPOCHS:
            if spec.get("begins"):
                loader.begin_pass()
                if not counters.losses:
                    torch.rand(3)
            for x, y in (
                left_of(ahead(loader), limit, counters)
                if spec.get("reads_ahead")
                else left_of(loader, limit, counters)
            ):
                bench.reach(f"step {counters.batches}")
                loss = (bench.model(x) - y).square().mean()
                was_bad = bench.directory / "was_bad"
                if counters.batches == spec.get("bad") and not was_bad.exists():
                    was_bad.touch()
                    loss = loss * float("nan")
                (loss / 2).backward()
                may_step = run.should_step(loss)
                if not may_step:
                    bench.optimizer.zero_grad()
                elif counters.batches % 2:
                    bench.optimizer.step()
                    bench.optimizer.zero_grad()
                counters.losses.append(loss.item())
                run.log(loss=loss)
                counters.batches += 1
                bench.reach(f"end {counters.batches}")
                place = {"epoch": counters.epoch, "taken": counters.batches}
                if run.boundary(counters.batches, **place):
                    return
                if counters.batches == spec.get("finish_at"):
                    run.finish("good enough")
            if "limit" in spec and not spec.get("forgets"):
                loader.end_pass()
            schedule.step(sum(counters.losses) / len(counters.losses))
            counters.losses = []
            counters.epoch += 1
            bench.reach(f"epoch {counters.epoch}")
        run.end_loop()
        bench.reach("after")


if __name__ == "__main__":
    play_arguments(lambda directory, spec: play([trainer], directory, spec))
