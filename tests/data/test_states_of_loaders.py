"""Loaders with a `state_dict` that is their place, and with one that is not."""

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
from forge.jobdir import process_id

DATA = torch.arange(24.0)
WARNING = "is the same before and after a batch"


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


class Late(Shuffled):
    """Counts a batch once the next one is wanted: it is one behind."""

    def __init__(self):
        super().__init__()
        self.taken = 0

    def __iter__(self):
        while self.taken < 6:
            yield DATA[4 * self.taken : 4 * self.taken + 4]
            self.taken += 1
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Nothing(Late):
    """Has a state because a base class wants one."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Drawing(Shuffled):
    """Draws each sample as it goes: its state moves on, and is no place all the same."""

    def __iter__(self):
        for _ in range(6):
            yield torch.rand(4, generator=self.source)


class Right(Late):
    """Counts before it hands out."""

    def __iter__(self):
        while self.taken < 6:
            self.taken += 1
            yield DATA[4 * self.taken - 4 : 4 * self.taken]
        self.taken = 0


class Whole(Shuffled):
    """One batch is all of a pass; what it keeps changes with none."""

    def __len__(self):
        return 1

    def __iter__(self):
        yield DATA

    def state_dict(self):
        return {"seed": 1}

    def load_state_dict(self, state):
        assert state == {"seed": 1}


class LikeAccelerate(Right):
    """Reads one batch ahead, and says the place of the one before."""

    def __iter__(self):
        ahead = super().__iter__()
        batch, state = next(ahead, None), super().state_dict()
        for following in itertools.chain(ahead, [None] * (batch is not None)):
            self.said = state
            state = super().state_dict()
            yield batch
            batch = following

    def state_dict(self):
        return self.said

    def load_state_dict(self, state):
        super().load_state_dict(state)


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


NO_PLACE = [Shuffled, Moving, Late, Nothing]


@pytest.mark.parametrize(("kind", "form"), each_value(NO_PLACE, ["steps", "batches", "loader"]))
def test_a_state_that_is_no_place_is_named_and_the_pass_goes_on_where_it_was(
    kind, form, train, caplog
):
    """A whole new pass, or the last batch again, followed a resume, in silence."""
    whole = train("whole", kind(), form)
    (line,) = [one for one in caplog.messages if WARNING in one]
    assert f"{kind.__name__}.state_dict()" in line
    assert whole[6:12] != whole[:6] or kind in (Late, Nothing)
    for crash_at in (1, 2, 7, 12):
        with pytest.raises(Crash):
            train("job", kind(), form, crash_at=crash_at)
    assert train("job", kind(), form) == whole[12:]


@pytest.mark.parametrize(
    ("kind", "crash"),
    each_value(
        [*NO_PLACE, Right, LikeAccelerate],
        [*(("steps", n) for n in (1, 2, 4, 7, 12)), ("batches", 1), ("batches", 7)],
    ),
)
def test_a_crash_anywhere_changes_no_batch(kind, crash, train):
    """The first two batches decide, and a resume may come before the second."""
    form, crash_at = crash
    whole = train("whole", kind(), form)
    with pytest.raises(Crash):
        train("job", kind(), form, crash_at=crash_at)
    assert train("job", kind(), form) == whole[crash_at:]


@pytest.mark.parametrize("kind", [Right, LikeAccelerate, Whole, Drawing])
def test_a_state_that_may_be_a_place_is_not_accused(kind, train, caplog):
    """Nor is one of a loader with one batch a pass: it is another pass that follows."""
    train("whole", kind(), "batches")
    assert not [one for one in caplog.messages if WARNING in one]


@pytest.mark.parametrize("form", ["steps", "loader"])
def test_a_pass_that_yields_more_than_was_left_is_an_error(form, train):
    """A loader whose state changes with each batch, but is no position."""
    with pytest.raises(Crash):
        train("job", Drawing(), form, crash_at=4)
    with pytest.raises(forge.Exit) as error:
        train("job", Drawing(), form)
    assert error.value.code == 78
    assert "the loader given to run.steps (Drawing) was resumed inside a pass of 6" in str(
        error.value
    )


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


def test_a_state_that_no_checkpoint_can_hold_names_the_loader(tmp_path):
    """At its first batch, and not as a traceback that a launcher would start again."""
    with outliving(), forge.Run({"checkpoint": {"dir": str(tmp_path)}}) as run:
        steps = run.steps(6, Queued())
        with pytest.raises(forge.ConfigError, match=r"Queued\.state_dict.*deque"):
            list(steps)
