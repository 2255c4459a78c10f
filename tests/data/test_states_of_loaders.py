"""Loaders with a `state_dict`: one that is known to be their place, and one that is not."""

import collections
import itertools
import re
from pathlib import Path

import pytest
import torch
from nan_trainer import outliving
from rows import each_value
from torch.utils.data import DataLoader

import forge
from forge.jobdir import ledger, process_id

DATA = torch.arange(24.0)


class Crash(Exception):
    """Stands for a kill."""


class Shuffled:
    """Keeps its generator alone; the order is drawn with the first batch."""

    def __init__(self):
        self.source = torch.Generator().manual_seed(1)

    def __len__(self):
        return 6

    def __iter__(self):
        for batch in torch.randperm(24, generator=self.source).split(4):
            yield DATA[batch]

    def state_dict(self):
        return {"source": self.source.get_state()}

    def load_state_dict(self, state):
        self.source.set_state(state["source"])


class Moving(DataLoader):
    """A DataLoader that keeps its generator, as forge's warning of its `__iter__` was read."""

    def __init__(self):
        super().__init__(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(1))

    def __iter__(self):
        for batch in super().__iter__():
            yield batch.double()

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class Counted:
    """Counts its batches, and says that a resume can rely on it."""

    exact = True

    def __init__(self):
        self.taken = 0

    def __iter__(self):
        while self.taken < 6:
            self.taken += 1
            yield DATA[4 * self.taken - 4 : 4 * self.taken]
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Late(Counted):
    """Counts a batch once the next one is wanted, and does not say that this is its place."""

    exact = False

    def __iter__(self):
        while self.taken < 6:
            yield DATA[4 * self.taken : 4 * self.taken + 4]
            self.taken += 1
        self.taken = 0


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in one of three forms; each call counts as a process of its own."""
    count = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(count)}")

    def batches(run, form, loader):
        if form == "batches":
            for _ in run.epochs(3):
                yield from run.batches(loader)
        elif form == "loader":
            for step, _, batch in run.steps(18, [0], loader):
                yield step, batch
        else:
            yield from run.steps(18, loader)

    def one(name, loader, form="steps", crash_at=None):
        saves = {"dir": str(tmp_path / name), "every_steps": None if crash_at is None else 1}
        seen, policy = [], {"checkpoint": saves}
        torch.manual_seed(2)
        with outliving(), forge.Run(policy, model=torch.nn.Linear(1, 1)) as run:
            for step, batch in batches(run, form, loader):
                if step == crash_at:
                    raise Crash
                seen.append((step, batch.tolist()))
        return seen

    return one


UNKNOWN = [Shuffled, Moving, Late]


@pytest.mark.parametrize(("kind", "form"), each_value(UNKNOWN, ["steps", "batches", "loader"]))
def test_a_state_that_is_not_known_to_be_a_place_is_named_and_the_batches_are_skipped(
    kind, form, train, caplog, tmp_path
):
    """A whole new pass, or the last batch again, would follow a resume."""
    whole = train("whole", kind(), form)
    (line,) = [one for one in caplog.messages if "Not known to resume exactly" in one]
    assert f"a {kind.__name__}: give it a state_dict" in line
    assert "`exact = True`" in line
    (attempt,) = ledger.read(tmp_path / "whole").attempts
    (event,) = [one for one in attempt.events if one["kind"] == "inexact"]
    assert event["text"] in line
    for crash_at in (1, 2, 7, 12):
        with pytest.raises(Crash):
            train("job", kind(), form, crash_at=crash_at)
    assert train("job", kind(), form) == whole[12:]


@pytest.mark.parametrize(
    ("kind", "crash"),
    each_value(
        [*UNKNOWN, Counted],
        [*(("steps", n) for n in (1, 2, 4, 7, 12)), ("batches", 1), ("batches", 7)],
    ),
)
def test_a_crash_anywhere_changes_no_batch(kind, crash, train):
    """Inside a pass, and between two."""
    form, crash_at = crash
    whole = train("whole", kind(), form)
    with pytest.raises(Crash):
        train("job", kind(), form, crash_at=crash_at)
    assert train("job", kind(), form) == whole[crash_at:]


def test_a_loader_that_says_that_it_is_exact_is_not_named(train, caplog):
    train("whole", Counted(), "batches")
    assert not [one for one in caplog.messages if "Not known to resume exactly" in one]


def test_the_loader_of_the_docs_knows_its_place(train):
    """It is copied from there."""
    page = Path(__file__).parents[2] / "docs" / "explanation" / "same-bits.md"
    (code,) = re.findall(r"```python\n(class Batches.*?)```", page.read_text(), re.DOTALL)
    names = {"torch": torch}
    exec(code, names)

    def loader():
        return names["Batches"](DATA, 4)

    whole = train("whole", loader())
    assert whole[:6] != whole[6:12]
    for crash_at in (1, 4, 6, 11, 13):
        with pytest.raises(Crash):
            train("job", loader(), crash_at=crash_at)
    assert train("job", loader()) == whole[13:]


class Queued(Shuffled):
    """Its state has a type that no checkpoint can hold."""

    def state_dict(self):
        return {"queue": collections.deque([1])}


@pytest.mark.parametrize("form", ["first", "second"])
def test_a_state_that_no_checkpoint_can_hold_names_the_loader(form, tmp_path):
    """At its first batch, and not at the first save, and as no traceback that is started again."""
    policy = {"checkpoint": {"dir": str(tmp_path)}}
    with pytest.raises(forge.Exit) as exit_, outliving(), forge.Run(policy) as run:
        list(run.steps(6, *([[0]] if form == "second" else []), Queued()))
    assert exit_.value.code == 78
    assert re.search(r"Queued\.state_dict.*deque", exit_.value.text)
