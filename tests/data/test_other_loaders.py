"""A loader that is another one at a resume: refused inside an epoch, named between two."""

import itertools

import pytest
import torch
from nan_trainer import outliving
from number_datasets import Numbers, Stream
from rows import each_value, few
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import forge
from forge.jobdir import process_id

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Crash(Exception):
    """Stands for a kill."""


class Moving(DataLoader):
    """Moves each batch, as a wrapper for a device does."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch.double()


def numbers(size=30, batch_size=4, kind=DataLoader, **options):
    return kind(Numbers(size), batch_size=batch_size, **options)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains in one of three forms; each call counts as a process of its own."""
    count = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(count)}")

    def batches(run, form, loader, end):
        if form == "batches":
            for _ in run.epochs(3):
                yield from run.batches(loader)
        elif form == "loader":
            for step, _, batch in run.steps(end, [0], loader):
                yield step, batch
        else:
            yield from run.steps(end, loader)

    def one(loader, form="steps", crash_at=None, end=20, **stateful):
        saves = {"dir": str(tmp_path / "job"), "every_steps": None if crash_at is None else 1}
        seen, policy = [], {"checkpoint": saves}
        torch.manual_seed(2)
        with outliving(), forge.Run(policy, model=torch.nn.Linear(1, 1), **stateful) as run:
            for step, batch in batches(run, form, loader, end):
                if step == crash_at:
                    raise Crash
                seen.append(torch.as_tensor(batch).tolist())
        return seen

    return one


OTHERS = {
    "dataset": (numbers, lambda: numbers(46), "the length of its dataset was 30 and is 46"),
    "batch size": (numbers, lambda: numbers(batch_size=8), "its batch size was 4 and is 8"),
    "shuffle": (
        lambda: numbers(shuffle=True),
        numbers,
        "whether it is shuffled was True and is False",
    ),
    "list": (
        lambda: list(numbers()),
        lambda: list(numbers(46)),
        "the length of its dataset was 8 and is 12",
    ),
    "stateful": (
        numbers,
        lambda: numbers(kind=StatefulDataLoader),
        "whether it restores its place itself was False and is True",
    ),
    "another stateful": (
        lambda: numbers(kind=StatefulDataLoader),
        lambda: numbers(batch_size=8, kind=StatefulDataLoader),
        "its batch size was 4 and is 8",
    ),
}


@pytest.mark.parametrize(
    ("name", "form"),
    few(
        len(OTHERS) + 2,
        [(name, "steps") for name in OTHERS]
        + [("dataset", "batches"), ("shuffle", "loader")]
        + [("dataset", "loader"), ("shuffle", "batches")],
    ),
)
def test_another_loader_inside_an_epoch_is_refused_by_its_properties(name, form, train):
    """The rest of the epoch would be other batches: the job trained on them in silence."""
    before, after, words = OTHERS[name]
    with pytest.raises(Crash):
        train(before(), form, crash_at=3)
    with pytest.raises(forge.Exit) as error:
        train(after(), form)
    assert error.value.code == 78
    assert words in error.value.text
    assert "saved after 3 batches of a pass" in error.value.text
    with pytest.raises(Crash):  # nothing is lost: with the loader as it was, it goes on
        train(before(), form, crash_at=4)


@pytest.mark.parametrize(
    ("name", "form"),
    each_value(["dataset", "batch size", "list"], ["steps", "batches", "loader"]),
)
def test_another_loader_at_an_epochs_start_is_named_and_taken(name, form, train, caplog):
    """No batch of the pass was taken: it can be of the new loader."""
    before, after, words = OTHERS[name]
    with pytest.raises(Crash):
        train(before(), form, crash_at=8)
    with caplog.at_level("WARNING", "forge"):
        found = train(after(), form, end=32)
    epoch = [batch.tolist() for batch in after()]
    assert found[: 2 * len(epoch)] == epoch * 2
    (line,) = [one for one in caplog.messages if "has changed since the checkpoint" in one]
    assert words in line


class Source:
    """Seven batches a pass, and a state: an iterable of the user's own."""

    exact = True
    place = 0

    def __iter__(self):
        while self.place < 7:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("form", ["steps", "batches", "loader"])
def test_a_source_can_be_an_object_of_the_run_too(form, train):
    """Its place is then restored twice, by the Run and by the loop, to the same batch."""
    for crash_at in (3, 9):
        source = Source()
        with pytest.raises(Crash):
            train(source, form, crash_at=crash_at, source=source)
    source = Source()
    found = train(source, form, source=source)
    assert found == [step % 7 + 1 for step in range(9, 21 if form == "batches" else 20)]


def test_the_same_loader_is_not_said_to_be_another_one(train, caplog):
    """Inside an epoch, and between two."""
    for crash_at in (3, 8, 11):
        with pytest.raises(Crash):
            train(numbers(shuffle=True), crash_at=crash_at)
    with caplog.at_level("WARNING", "forge"):
        train(numbers(shuffle=True))
    assert not [one for one in caplog.messages if "has changed since the checkpoint" in one]


class Labelled(DataLoader):
    """A subclass that is iterated as a DataLoader is."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (numbers, lambda: numbers(kind=Labelled)),
        (numbers, lambda: numbers(kind=Moving)),
        (lambda: DataLoader(Stream(), 2), lambda: Moving(Stream(), 2)),
    ],
    ids=["wrapped", "moved", "stream, moved"],
)
def test_a_loader_of_the_same_batches_resumes_though_it_is_another_one(before, after, train):
    """Only the properties on which the batches depend are compared."""
    samples = [sample for batch in before() for sample in batch.tolist()]
    (first, *_) = before()
    with pytest.raises(Crash):
        train(before(), crash_at=2)
    found = [sample for batch in train(after(), end=4) for sample in batch]
    assert found == samples[2 * len(first) :][: len(found)]


def test_a_batch_size_that_is_kept_in_the_run_resumes(train, tmp_path):
    """It was halved in the loop, and the loader is built from it."""

    def attempt(crash_at=None):
        seen, policy = [], {"checkpoint": {"dir": str(tmp_path / "one"), "every_steps": 1}}
        with outliving(), forge.Run(policy, model=torch.nn.Linear(1, 1)) as run:
            run.state["batch_size"] = 8
            while run.step < 12:
                loader = numbers(32, run.state["batch_size"], shuffle=True)
                for step, batch in run.steps(12, loader):
                    if step == crash_at:
                        raise Crash
                    seen.append((step, batch.tolist()))
                    if step == 4 and run.state["batch_size"] == 8:
                        run.state["batch_size"] = 4
                        break
        return seen

    with pytest.raises(Crash):
        attempt(crash_at=7)
    found = attempt()
    assert [step for step, _ in found] == [7, 8, 9, 10, 11]
    assert {len(batch) for _, batch in found} == {4}
