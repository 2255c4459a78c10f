"""What the loop changes of its loader and no checkpoint holds is refused while the job lives."""

import itertools

import pytest
import torch
from nan_trainer import outliving
from number_datasets import Numbers
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, WeightedRandomSampler

import forge
from forge.jobdir import process_id


class Crash(Exception):
    """Stands for a kill."""


class Parts:
    """A loader, and what a script changes of it."""

    def __init__(self, *, is_weighted=False):
        self.subset = Subset(Numbers(40), list(range(12)))
        self.easy = Subset(Numbers(40), torch.arange(12))
        self.weighted = WeightedRandomSampler(torch.ones(12), 12)
        self.drawn = SubsetRandomSampler(range(12))
        made = {
            "subset": lambda: DataLoader(self.subset, 4),
            "tensor": lambda: DataLoader(forge.data.seeded(self.easy, 1), 4),
            "weighted": lambda: DataLoader(self.subset, 4, sampler=self.weighted),
            "drawn": lambda: DataLoader(Numbers(40), 4, sampler=self.drawn),
        }
        self.loaders = {name: make() for name, make in made.items()}


CHANGES = {
    "batch size": ("subset", "BatchSampler.batch_size"),
    "drop_last": ("subset", "BatchSampler.drop_last"),
    "weights in place": ("weighted", "WeightedRandomSampler.weights"),
    "other weights": ("weighted", "WeightedRandomSampler.weights"),
    "more indices": ("subset", "Subset.indices"),
    "other indices": ("subset", "Subset.indices"),
    "indices in place": ("tensor", "Subset.indices"),
    "a sampler's indices": ("drawn", "SubsetRandomSampler.indices"),
}


def change(name, parts, loader):
    if name == "batch size":
        loader.batch_sampler.batch_size = 6
    elif name == "drop_last":
        loader.batch_sampler.drop_last = True
    elif name == "weights in place":
        parts.weighted.weights[3] *= 2
    elif name == "other weights":
        parts.weighted.weights = parts.weighted.weights * 2
    elif name == "more indices":
        parts.subset.indices.append(30)
    elif name == "other indices":
        parts.subset.indices = list(range(20, 32))
    elif name == "indices in place":
        parts.easy.indices[0] = 39
    else:
        parts.drawn.indices = range(20, 32)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A `forge.Run` that counts as one of a process of its own."""
    count = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(count)}")

    def one(name="job"):
        policy = {"checkpoint": {"dir": str(tmp_path / name), "every_steps": 1}}
        return forge.Run(policy, model=torch.nn.Linear(1, 1))

    with outliving():
        yield one


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "batches") for name in CHANGES]
    + [("other weights", form) for form in ("steps", "loader", "after a pass")],
)
def test_what_the_loop_changes_of_a_loader_is_refused_by_its_name(name, form, run):
    """It was lost at a resume, or moved the place in the pass, in silence."""
    key, words = CHANGES[name]
    parts = Parts()
    loader, steps = parts.loaders[key], []

    def train():
        with run() as training:
            if form in ("steps", "loader"):
                for step, *_ in training.steps(8, *([[0]] if form == "loader" else []), loader):
                    steps.append(step)
                    if len(steps) == 4:
                        change(name, parts, loader)
            else:
                for _ in training.epochs(4):
                    for step, _ in training.batches(loader):
                        steps.append(step)
                        if len(steps) == 4 and form == "batches":
                            change(name, parts, loader)
                    if len(steps) == 3 and form == "after a pass":
                        change(name, parts, loader)

    with pytest.raises(forge.Exit) as error:
        train()
    assert error.value.code == 78
    assert words in error.value.text
    assert len(steps) == (3 if form == "after a pass" else 4)


def test_what_is_changed_before_a_break_is_refused_by_the_next_loop(run):
    """No boundary follows the last step of a loop that is left by it."""
    parts = Parts()

    def train():
        with run() as training:
            for step, _ in training.steps(8, parts.loaders["weighted"]):
                if step == 2:
                    parts.weighted.weights = torch.arange(12.0)
                    break
            for _ in training.steps(12, parts.loaders["weighted"]):
                pass

    with pytest.raises(forge.Exit, match=r"WeightedRandomSampler\.weights was changed"):
        train()


def test_what_is_changed_between_two_loops_is_changed_there_at_each_start(run):
    """That code runs again at a resume."""

    def attempt(crash_at=None):
        torch.manual_seed(1)
        parts, seen = Parts(), []
        with run() as training:
            for _, batch in training.steps(4, parts.loaders["weighted"]):
                seen.append(batch.tolist())
            parts.weighted.weights = torch.arange(12.0)
            training.save()
            for step, batch in training.steps(10, parts.loaders["weighted"]):
                if step == crash_at:
                    raise Crash
                seen.append(batch.tolist())
        parts.weighted.weights = torch.ones(12)
        return seen

    with pytest.raises(Crash):
        attempt(crash_at=8)
    assert len(attempt()) == 2


def test_a_sampler_made_anew_for_each_epoch_is_no_change(run):
    """As the error advises it: from what `run.state` holds."""

    def attempt(crash_at=None):
        torch.manual_seed(1)
        seen = []
        with run() as training:
            training.state["weights"] = torch.ones(12)
            for _ in training.epochs(3):
                sampler = WeightedRandomSampler(training.state["weights"], 12)
                for step, batch in training.batches(DataLoader(Numbers(12), 4, sampler=sampler)):
                    if step == crash_at:
                        raise Crash
                    seen.append(batch.tolist())
                training.state["weights"] = training.state["weights"] * torch.arange(12.0)
        return seen

    with pytest.raises(Crash):
        attempt(crash_at=4)
    assert len(attempt()) == 5
