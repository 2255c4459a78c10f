"""Loops of other shapes than one `for` to the end: phases, break, a longer run, an evaluation."""

import functools
import itertools

import pytest
import torch
from nan_trainer import outliving
from rows import few
from torch.utils.data import DataLoader

import forge
from forge.jobdir import ledger, process_id


class Crash(Exception):
    pass


class Trainer:
    """Builds all anew in each attempt, as a script does; `crash_at` ends one like a kill."""

    def __init__(self, directory):
        self.directory = directory
        self.seen = []

    def run(self, loop, crash_at=None):
        saves = {"every_steps": None if crash_at is None else 1, "keep_last": 2}
        policy = {"checkpoint": {"dir": str(self.directory), **saves}}
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        )
        optimizer = torch.optim.Adam(model.parameters())
        self.loader = DataLoader(
            torch.arange(6.0).reshape(6, 1),
            shuffle=True,
            generator=torch.Generator().manual_seed(2),
        )

        def train(run, step, x):
            if step == crash_at:
                raise Crash
            loss = model(x).square().sum()
            loss.backward()
            run.update(loss, optimizer)
            run.log(loss=loss)
            self.seen.append((step, x.item()))

        try:
            with forge.Run(policy, model=model, optimizer=optimizer) as run:
                loop(run, self.loader, train)
        except Crash:
            return None
        return model.state_dict()

    @property
    def metrics(self):
        return ledger.read(self.directory).metrics


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Each of its runs counts as a process of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")
    return lambda: Trainer(tmp_path / "job")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The trainer of a loop that nobody stopped, and its weights: made once for all tests."""

    @functools.cache
    def run(loop):
        one = Trainer(tmp_path_factory.mktemp("undisturbed") / "job")
        return one, one.run(loop)

    return run


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


@functools.cache
def plain(n):
    def loop(run, loader, train):
        for step, x in run.steps(n, loader):
            train(run, step, x)

    return loop


def phases(run, loader, train):
    for step, x in run.steps(8, loader):
        train(run, step, x)
    for step, x in run.steps(15, DataLoader(torch.full((4, 1), 9.0), shuffle=True)):
        train(run, step, x)
    for step in run.steps(18):
        train(run, step, torch.rand(1, 1))


def shared_phases(run, loader, train):
    for step, x in run.steps(8, loader):
        train(run, step, x)
    for step, x in run.steps(15, loader):
        train(run, step, x)


@pytest.mark.parametrize("crash_at", few(4, [7, 8, 14, 17, 0, 1, 9, 15]))
def test_phases_with_loaders_of_their_own_resume_in_the_right_one(crash_at, trainer, undisturbed):
    """Warm-up, training, cool-down in one Run."""
    one, (whole, expected) = trainer(), undisturbed(phases)
    assert one.run(phases, crash_at) is None
    assert_same(one.run(phases), expected)
    assert one.seen == whole.seen
    assert one.metrics == whole.metrics


def broken_phases(run, loader, train):
    for step, x in run.steps(8, loader):
        train(run, step, x)
        if step == 4:
            break
    for step, x in run.steps(12, loader):
        train(run, step, x)


@pytest.mark.parametrize("crash_at", few(2, [5, 11, 4, 6]))
def test_a_phase_that_a_break_has_ended_is_not_entered_again(crash_at, trainer, undisturbed):
    """Early stopping of the warm-up, then a kill in the training after it."""
    one, (whole, expected) = trainer(), undisturbed(broken_phases)
    one.run(broken_phases, crash_at)
    assert_same(one.run(broken_phases), expected)
    assert one.metrics == whole.metrics


@pytest.mark.parametrize("crash_at", few(2, [7, 9, 14]))
def test_phases_that_share_a_loader_go_on_with_its_generator(crash_at, trainer, undisturbed):
    """The second phase shuffles on where the first ended."""
    one, (whole, expected) = trainer(), undisturbed(shared_phases)
    one.run(shared_phases, crash_at)
    assert_same(one.run(shared_phases), expected)
    assert one.seen == whole.seen


def test_a_stop_between_phases_that_share_a_loader_keeps_its_generator(trainer, undisturbed):
    """Exactly at the border no iterator is there to take the generator's state from."""
    one = trainer()
    one.run(shared_phases, crash_at=8)
    assert_same(one.run(shared_phases), undisturbed(shared_phases)[1])


def test_a_break_ends_training_and_a_restart_trains_nothing_again(trainer):
    """Early stopping: the step that found it counts, and what follows the loop runs each time."""
    after = []

    def loop(run, loader, train):
        for step, x in run.steps(100, loader):
            train(run, step, x)
            if step == 4:
                break
        after.append("ran")

    one = trainer()
    expected = one.run(loop)
    assert_same(one.run(loop), expected)
    assert [step for step, _ in one.seen] == [0, 1, 2, 3, 4]
    assert after == ["ran", "ran"]


def test_after_a_break_the_run_knows_at_once_that_the_step_is_done(trainer):
    """`run.step` is printed there, and `run.save()` called: both must not lie in a step."""
    after = []

    def loop(run, loader, train):
        for step, x in run.steps(100, loader):
            train(run, step, x)
            if step == 4:
                break
        after.append(run.step)

    trainer().run(loop)
    assert after == [5]


def test_a_break_before_the_update_does_not_count_its_step(trainer):
    """Nothing was learned from it."""

    def loop(run, loader, train):
        for step, x in run.steps(100, loader):
            if step == 4:
                break
            train(run, step, x)

    one = trainer()
    one.run(loop)
    assert (one.directory / "latest").resolve().name == "step_4"


def test_a_break_counts_its_step_though_something_holds_the_loop(trainer):
    """`bar = tqdm(run.steps(…))` keeps the generator alive, so that it hears of no break."""

    def loop(run, loader, train):
        self.held = run.steps(100, loader)
        for step, x in self.held:
            train(run, step, x)
            if step == 4:
                break

    self = one = trainer()
    one.run(loop)
    assert (one.directory / "latest").resolve().name == "step_5"


@pytest.mark.parametrize("first", few(2, [7, 1, 6]))
def test_a_finished_run_that_is_made_longer_goes_on_exactly(first, trainer, undisturbed):
    """`steps=15` after `steps=7` is what people do when the loss still falls."""
    one, (whole, expected) = trainer(), undisturbed(plain(15))
    one.run(plain(first))
    assert_same(one.run(plain(15)), expected)
    assert one.seen == whole.seen
    assert one.metrics == whole.metrics


def test_a_finished_run_that_is_made_shorter_is_finished(trainer):
    """There is nothing to take back."""
    one = trainer()
    expected = one.run(plain(7))
    assert_same(one.run(plain(3)), expected)
    assert len(one.seen) == 7


@pytest.mark.parametrize("every", few(1, [3, 1, 2, 5]))
def test_crashes_at_every_step_change_no_bit(every, trainer, undisturbed):
    """One after the other, each attempt a little further than the last."""
    one, (whole, expected) = trainer(), undisturbed(plain(13))
    for crash_at in range(0, 13, every):
        assert one.run(plain(13), crash_at) is None
    assert_same(one.run(plain(13)), expected)
    assert one.seen == whole.seen
    assert one.metrics == whole.metrics


def test_a_dataset_that_shrank_ends_the_run_before_it_trains(trainer, undisturbed):
    """With both numbers, and nothing of the checkpoint touched."""
    one = trainer()
    one.run(plain(13), crash_at=5)

    def loop(run, loader, train):
        generator = torch.Generator()
        shorter = DataLoader([torch.ones(1)] * 2, shuffle=True, generator=generator)
        for step, x in run.steps(13, shorter):
            train(run, step, x)

    with outliving(), pytest.raises(forge.Exit, match=r"5 batches of a pass, .* was 6 and is 2"):
        one.run(loop)
    assert_same(one.run(plain(13)), undisturbed(plain(13))[1])
