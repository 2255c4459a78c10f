"""When saves happen, and the reaction to a failing disk."""

import errno
import os
import threading

import pytest
import torch

import forge
from forge.checkpoint import writing
from forge.config.schema import CheckpointConfig, HangConfig, NanConfig
from forge.errors import CheckpointError, DirectoryInUse
from forge.jobdir.ledger import read
from forge.jobdir.ledger_writer import Ledger
from forge.process import sections
from forge.process.progress import HeartbeatPage, Phase
from forge.shutdown import stopping
from forge.training.loop.snapshot_holder import PendingSnapshot
from forge.training.metrics import Metrics
from forge.training.nan.nan_policy import NanPolicy
from forge.training.saver import FINAL_TRIES, MAX_FAILURES, SaveCause, Saver


@pytest.fixture
def make_saver(open_store):
    ledgers = []

    def make(**config):
        store = open_store()
        ledgers.append(Ledger(store.directory))
        nan = NanPolicy(NanConfig())
        metrics = Metrics(ledgers[-1])
        return Saver(store, CheckpointConfig(**config), ledgers[-1], nan, metrics), store

    yield make
    for ledger in ledgers:
        ledger.close()


@pytest.fixture
def fail(monkeypatch):
    """Make the next `count` commits fail."""

    def failing(store, count, error=None):
        commit, left = store.commit, [count]

        def wrapped(snapshot, *others):
            left[0] -= 1
            if left[0] >= 0:
                raise error or OSError(errno.EIO, "Input/output error")
            return commit(snapshot, *others)

        monkeypatch.setattr(store, "commit", wrapped)
        return left

    return failing


def kinds(store):
    return [e["kind"] for e in read(store.directory).attempts[0].events[1:]]


def test_saves_by_time_count_from_the_last_one(make_saver, monkeypatch):
    """`every_s` limits the time that a kill costs, even if the steps are slow."""
    now = [100.0]
    monkeypatch.setattr("forge.training.saver.time.monotonic", lambda: now[0])
    saver, _ = make_saver(every_steps=None, every_s=60.0)
    saver.count_from(3)
    assert not saver.is_overdue(4)
    now[0] += 60
    assert saver.is_overdue(4)
    assert not saver.is_overdue(3)
    saver.save(4, dict, SaveCause.periodic)
    assert not saver.is_overdue(5)


@pytest.mark.parametrize("is_async", [False, True], ids=["here", "beside"])
def test_one_failed_save_is_told_and_training_goes_on(is_async, make_saver, fail, caplog):
    """A scratch disk that is full for a minute must not end the run of a week."""
    saver, store = make_saver(async_save=is_async)
    fail(store, MAX_FAILURES - 1)
    for step in range(1, MAX_FAILURES + 1):
        saver.save(step, lambda: {"x": 1}, SaveCause.periodic)
    saver.wait()
    told = [kind for kind in kinds(store) if kind != "saving"]
    assert told == ["save_failed"] * (MAX_FAILURES - 1) + ["save"]
    assert "failed (1 of 5 in a row): [Errno 5]" in caplog.text
    # A successful save resets the count.
    fail(store, MAX_FAILURES - 1)
    for step in range(10, 10 + MAX_FAILURES):
        saver.save(step, lambda: {"x": 1}, SaveCause.periodic)
    saver.wait()


@pytest.mark.parametrize("is_async", [False, True], ids=["here", "beside"])
def test_saves_that_fail_again_and_again_end_the_run(is_async, make_saver, fail):
    """The run would only train steps that it cannot save."""
    saver, store = make_saver(async_save=is_async)
    fail(store, 99)

    def save_all():
        for step in range(1, MAX_FAILURES + 1):
            saver.save(step, lambda: {"x": 1}, SaveCause.periodic)
        saver.wait()

    with pytest.raises(CheckpointError, match=rf"step {MAX_FAILURES} failed \(5 of 5 in a row\)"):
        save_all()


def test_the_save_at_a_stop_is_tried_again(make_saver, fail):
    """This save is the last chance to keep the work since the save before."""
    saver, store = make_saver()
    fail(store, FINAL_TRIES - 1)
    saver.save_final(7, lambda: {"x": 1}, SaveCause.stop)
    assert store.newest().manifest.step == 7


def test_a_stop_that_cannot_be_saved_says_so(make_saver, fail):
    """The job must not claim that it was saved."""
    saver, store = make_saver()
    fail(store, FINAL_TRIES)
    with pytest.raises(CheckpointError, match="step 7 could not be saved"):
        saver.save_final(7, lambda: {"x": 1}, SaveCause.stop)


def test_the_save_at_a_stop_happens_though_the_one_before_it_was_one_failure_too_many(
    make_saver, fail
):
    """The disk can work again; without another try the work would be lost."""
    saver, store = make_saver(async_save=True)
    fail(store, MAX_FAILURES)
    for step in range(1, MAX_FAILURES + 1):
        saver.save(step, lambda: {"x": 1}, SaveCause.periodic)
    saver.save_final(7, lambda: {"x": 1}, SaveCause.stop)
    assert store.newest().manifest.step == 7


@pytest.mark.parametrize("error", [DirectoryInUse("newer"), ValueError("a bug"), MemoryError()])
def test_any_failure_beside_training_comes_to_light(error, make_saver, fail):
    """A thread that dies in silence would leave a run that never saves again."""
    saver, store = make_saver(async_save=True)
    fail(store, 1, error)
    saver.save(1, lambda: {"x": 1}, SaveCause.periodic)
    with pytest.raises(type(error)):
        saver.wait()


def test_a_save_beside_training_is_the_state_of_its_own_step(make_saver, monkeypatch):
    """Training changes the weights while they are being written."""
    saver, store = make_saver(async_save=True)
    may_write = threading.Event()
    commit = store.commit

    def late(snapshot, *others):
        may_write.wait()
        return commit(snapshot, *others)

    monkeypatch.setattr(store, "commit", late)
    weights = torch.zeros(3)
    saver.save(1, lambda: {"w": weights}, SaveCause.periodic)
    weights += 1
    may_write.set()
    saver.wait()
    assert store.newest().state["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("failures", [1, FINAL_TRIES])
def test_a_held_boundary_that_cannot_be_written_is_tried_again(make_saver, monkeypatch, failures):
    """From the same copy: by the next try, or by the next call of `commit`."""
    saver, store = make_saver()
    write, left = writing.write_state, [failures]

    def written(*args):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return write(*args)

    monkeypatch.setattr(writing, "write_state", written)
    commit = saver.hold(7, lambda: {"w": torch.ones(3)}, may_write=True)
    assert commit is not None
    held = PendingSnapshot(commit)
    if failures == FINAL_TRIES:
        with pytest.raises(CheckpointError, match="step 7 could not be saved"):
            held.commit()
    held.commit()
    assert store.newest().state["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_full_disk_under_a_whole_run_ends_it_with_71(action, tmp_path, monkeypatch):
    """In a whole run: five failures, exit code 71, and the last good checkpoint stays.

    For a rollback the state is saved before each pass, not after steps.
    """
    model = torch.nn.Linear(2, 1)
    every_steps = 2 if action == "skip" else None
    saves = {"dir": str(tmp_path), "every_steps": every_steps, "async_save": False}
    policy = {"checkpoint": saves, "nan": {"action": action}}
    fsync = os.fsync
    is_full = False

    def failing(fd):
        if is_full and "step_" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr("forge.shutdown.stopping.leave", forge.Exit)
    seen = []

    def train():
        nonlocal is_full
        with forge.Run(policy, model=model) as run:
            for _ in run.epochs(50):
                for step, _ in run.batches([0, 1]):
                    is_full = step >= 5
                    seen.append(step)

    try:
        with pytest.raises(forge.Exit) as exit_:
            train()
    finally:
        stopping.uninstall()
    assert exit_.value.code == 71
    assert seen[-1] == 13  # saves at 6, 8, 10, 12 and 14 failed
    assert (tmp_path / "latest").resolve().name == "step_4"


def test_a_save_that_is_waited_for_is_one_to_whoever_watches(make_saver, monkeypatch):
    """A halt waits for the save, and the heartbeats of the save show progress."""
    saver, store = make_saver(async_save=True)
    page, may_commit, found = HeartbeatPage.create(), threading.Event(), []
    sections.begin(HangConfig(), page.environ)
    commit = store.commit

    def committing(*given):
        assert may_commit.wait(60)
        found.append(page.read().section)
        return commit(*given)

    monkeypatch.setattr(store, "commit", committing)
    state = {"metrics": {}}
    saver.save(1, lambda: state, SaveCause.periodic)
    join = saver._thread.join
    monkeypatch.setattr(saver._thread, "join", lambda: (may_commit.set(), join()))
    saver.finish()
    sections.end()
    page.close()
    assert found == [Phase.save]
