"""Training with one of several kinds of evaluation: python evaluates.py <dir> '{"kind": …}'

In attempt 1 `places` maps points of the evaluation (start, poll 1, late) at step 9, or `at`, to an
event: a signal's name; "raise"; or "sleep", which touches <dir>/ready first.
"""

import os
import signal
import threading
import time

import torch
from bench import DATA, play, play_arguments
from torch.utils.data import DataLoader

from forge.process import memory
from forge.training.loop import snapshot_holder

AT = 9
FORK = {"multiprocessing_context": "fork"}


class Evaluation:
    """Scores the model; each kind does something that a stop must not leave behind."""

    def __init__(self, bench, directory, run):
        self.bench, self.directory, self.run = bench, directory, run
        self.model = bench.model
        self.places = {} if bench.is_resumed else dict(bench.spec.get("places", {}))

    def __call__(self, step):
        getattr(self, self.bench.spec["kind"])(step)

    def reach(self, step, place):
        """Run the event of this point, if there is one."""
        wanted = self.places.pop(place, None) if step == self.bench.spec.get("at", AT) else None
        if wanted == "sleep":
            (self.directory / "ready").touch()
            time.sleep(600)
        elif wanted == "raise":
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("a helper has died")
        elif wanted:
            os.kill(os.getpid(), signal.Signals[f"SIG{wanted}"])

    def score(self, step):
        self.reach(step, "start")
        total = 0.0
        for number in range(3):
            total += self.model(torch.randn(4, 6)).sum().item()
            self.reach(step, f"poll {number}")
            self.run.check_stop()
        self.reach(step, "late")
        return total

    def draws(self, step):
        with torch.no_grad():
            self.run.log(held_out=self.score(step))

    def switches(self, step):
        """Switch to eval mode without `finally`, so that a stop leaves the model in it."""
        self.model.eval()
        self.draws(step)
        self.model.train()

    def swaps(self, step):
        """Use other weights during the evaluation, written through `.data`, without a version."""
        kept = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data.mul_(0.5)
        self.draws(step)
        for p, was in zip(self.model.parameters(), kept, strict=True):
            p.data.copy_(was)

    def swallows(self, step):
        """Swallow all exceptions by a bare `except:`, and evaluate again."""
        for _ in range(2):
            try:
                self.draws(step)
            except:  # noqa: E722
                with (self.directory / "swallowed").open("a") as file:
                    file.write("x")

    def remembers(self, step):
        """Keep the best score and a growing history in run.state."""
        state = self.run.state
        with torch.no_grad():
            score = self.score(step)
        state["best"] = max(state.get("best", -1e9), score)
        state.setdefault("history", []).append(score)
        self.run.log(best=state["best"], count=len(state["history"]))

    def elsewhere(self, step):
        """Poll in a thread, in a loader's worker and in a child process: each gets False."""
        answers = []
        thread = threading.Thread(target=lambda: answers.append(self.run.check_stop()))
        thread.start()
        thread.join()
        answers += [bool(one) for one in DataLoader(Polls(self.run), num_workers=1, **FORK)]
        child = os.fork()
        if child == 0:
            os._exit(int(self.run.check_stop()))
        answers.append(os.waitpid(child, 0)[1] != 0)
        assert answers == [False] * 3, answers
        self.draws(step)


class Polls(torch.utils.data.Dataset):
    def __init__(self, run):
        self.run = run

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.run.check_stop()


def train(bench):
    spec = bench.spec
    if spec.get("no_memory"):
        memory.free_bytes = lambda: 0
    with bench.run() as run:
        evaluation = Evaluation(bench, bench.directory, run)
        run.every(spec.get("every", 3), at_end=True)(evaluation)

        @run.every(AT)
        def after(step):
            run.log(after=torch.rand(()))

        for step, (x, y) in run.steps(20, DataLoader(DATA, 5, shuffle=True)):
            bench.reach(f"step {step}")
            bench.learn(run, x, y)


def main(directory, spec):
    snapshot_holder._COPIES = 0  # the snapshot of the boundary is kept even for a short evaluation
    play((train,), directory, {"loop": "train", **spec})


if __name__ == "__main__":
    play_arguments(main)
