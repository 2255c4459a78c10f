"""Mistakes that raise nothing: a training that changes nothing gets one warning, any other none."""

import itertools
import logging
import multiprocessing
import signal

import pytest
import torch
from nan_trainer import outliving

import forge
from forge.jobdir import process_id

NOTHING = "Nothing was updated in"
NO_GRADIENT = "run.update found no gradient"


class Job:
    """A model with two optimizers, in one directory."""

    def __init__(self, directory):
        torch.manual_seed(1)
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.first = torch.optim.SGD(self.body.parameters(), lr=0.1)
        self.second = torch.optim.SGD(self.head.parameters(), lr=0.1)
        self.policy = {"checkpoint": {"dir": str(directory), "every_steps": 1}}

    def run(self, *, has_optimizers=True):
        optimizers = {"first": self.first, "second": self.second} if has_optimizers else {}
        return forge.Run(self.policy, body=self.body, head=self.head, **optimizers)

    def loss(self):
        return self.head(self.body(torch.ones(4, 2))).square().mean()


@pytest.fixture
def job(tmp_path, monkeypatch):
    numbers = itertools.count()  # each Run as if in a process of its own
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")
    return Job(tmp_path / "saves")


@pytest.fixture
def warnings(caplog):
    """The warnings of this module's two kinds, logged so far."""
    caplog.set_level(logging.WARNING, "forge")

    def found():
        texts = [record.getMessage() for record in caplog.records]
        return [text for text in texts if NOTHING in text or NO_GRADIENT in text]

    return found


# -- a training that updates nothing ---------------------------------------------------------------


def test_a_training_without_an_update_says_so_once(job, warnings):
    """A script that lost `run.update` in a merge ends with exit code 0 and the first weights."""
    with job.run() as run:
        for _ in run.steps(3):
            job.loss().backward()
        for _ in run.steps(5):
            job.loss().backward()
    (text,) = warnings()
    assert f"{NOTHING} 5 steps" in text
    assert "Write `loss.backward()` and `run.update(loss, optimizer)` in the loop" in text


def evaluates(job):
    with job.run(has_optimizers=False) as run:
        for _ in run.steps(3):
            job.loss()


def accumulates(job):
    with job.run() as run:
        for step in run.steps(8):
            loss = job.loss()
            loss.backward()
            if step == 7:
                run.update(loss, [job.first, job.second])


def steps_by_itself(job):
    with job.run() as run:
        for _ in run.steps(3):
            loss = job.loss()
            loss.backward()
            if run.should_step(loss):
                job.first.step()


def has_everything_frozen(job):
    for one in (*job.body.parameters(), *job.head.parameters()):
        one.requires_grad_(False)
    with job.run() as run:
        for _ in run.steps(3):
            job.loss()


def trains_and_then_evaluates(job):
    """Resumed where only the second loop, an evaluation, is left."""
    for n in (4, 6):
        with job.run() as run:
            for _ in run.steps(2):
                loss = job.loss()
                loss.backward()
                run.update(loss, [job.first, job.second])
            for _ in run.steps(n):
                job.loss()


def has_no_steps(job):
    with job.run() as run:
        for _ in run.steps(0):
            raise AssertionError


def freezes_one_part(job):
    """The frozen part has an update as well, which has nothing to do."""
    for one in job.body.parameters():
        one.requires_grad_(False)
    with job.run() as run:
        for _ in run.steps(3):
            loss = job.loss()
            loss.backward()
            run.update(loss, job.first)
            run.update(loss, job.second)


def has_an_expert_without_tokens(job):
    """The backward pass reaches the other optimizer's parameters only, before or after."""
    with job.run() as run:
        for step in run.steps(4):
            loss = job.head(torch.ones(4, 2)).square().mean()
            loss.backward()
            for optimizer in (job.first, job.second)[:: 1 if step % 2 else -1]:
                run.update(loss, optimizer)


@pytest.mark.parametrize(
    "train",
    [
        evaluates,
        accumulates,
        steps_by_itself,
        has_everything_frozen,
        trains_and_then_evaluates,
        has_no_steps,
        freezes_one_part,
        has_an_expert_without_tokens,
    ],
)
def test_a_training_that_means_it_has_no_warning(train, job, warnings):
    """A warning that is wrong once is not read the next time."""
    train(job)
    assert warnings() == []


# -- an update without a gradient ------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_an_update_without_backward_says_so_once(enabled, job, warnings):
    """The loss is logged, the step is counted, and nothing is trained."""
    job.policy["enabled"] = enabled
    with job.run() as run:
        for _ in run.steps(3):
            run.update(job.loss(), [job.first, job.second])
    (text,) = warnings()
    assert f"Step 0: {NO_GRADIENT} in any parameter" in text
    assert "Call `loss.backward()` before `run.update(loss, optimizer)`" in text


# -- objects whose state is not saved --------------------------------------------------------------


class Wrapper:
    """An optimizer in a class of the user, whose state_dict contains that of the optimizer."""

    def __init__(self, optimizer):
        self.inner = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


def train_with_both(job, given):
    """Step both optimizers, and one over a copy of the weights, which needs no save."""
    unused = torch.optim.Adam(job.body.parameters())  # it exists, and never steps
    with outliving(), forge.Run(job.policy, body=job.body, head=job.head, **given(job)) as run:
        for _ in run.steps(3):
            loss = job.loss()
            loss.backward()
            copy = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
            for optimizer in (job.first, job.second, copy) if run.should_step(loss) else ():
                optimizer.step()
    assert not unused.state
    return run.step


@pytest.mark.parametrize(
    "given",
    [
        lambda job: {"first": job.first, "second": job.second},
        lambda job: {"first": job.first, "second": Wrapper(job.second)},
    ],
    ids=["both", "wrapped"],
)
def test_optimizers_that_were_given_and_those_of_copies_train(given, job):
    """An optimizer is not refused because it exists, nor one that trains something else."""
    assert train_with_both(job, given) == 3


@pytest.mark.parametrize(
    ("given", "name"),
    [(lambda job: {"first": job.first}, "head"), (lambda job: {}, "body")],
    ids=["one", "none"],
)
def test_an_optimizer_that_was_not_given_is_refused_at_its_first_step(given, name, job):
    """Its moments would be zero again after a resume; a warning alone was not read."""
    with pytest.raises(forge.Exit) as exit_:
        train_with_both(job, given)
    assert exit_.value.code == 78
    assert f"SGD trains {name}.weight, {name}.bias, but its state is not saved" in exit_.value.text


def test_an_optimizer_that_is_made_again_in_the_loop_is_refused(job):
    """The one that was given is saved, and no longer trains anything."""

    def train():
        with outliving(), job.run() as run:
            for step in run.steps(4):
                made = torch.optim.SGD(job.body.parameters(), 0.1) if step == 2 else job.first
                job.loss().backward()
                made.step()

    with pytest.raises(forge.Exit) as exit_:
        train()
    assert exit_.value.code == 78
    assert "Step 2 has a problem" in exit_.value.text


@pytest.mark.parametrize("start", ["before", "blocked", "within"])
def test_children_that_a_sigterm_to_all_would_end_are_told_once(job, caplog, start):
    """A pool whose worker has ended never gives the step its result: it lost what was unsaved."""
    caplog.set_level(logging.WARNING, "forge")
    context = multiprocessing.get_context("fork")
    child = context.Process(target=signal.pause, name="helper")
    if start == "before":
        child.start()
    elif start == "blocked":
        with forge.block_signals():
            child.start()
    try:
        with job.run(has_optimizers=False) as run:
            if start == "within":
                child.start()
            for _ in range(2):
                for _ in run.steps(run.step + 2):
                    pass
    finally:
        child.kill()
        child.join()
    texts = [r.getMessage() for r in caplog.records if "SIGTERM to all" in r.getMessage()]
    assert len(texts) == (start == "before")
    assert all("end these child processes: helper." in text for text in texts)
