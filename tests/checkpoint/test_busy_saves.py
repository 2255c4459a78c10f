"""A save that is due while another one is still being written beside training."""

import errno
import threading

import pytest
import torch

from forge.config.loading import load
from forge.config.schema import CheckpointConfig, NanConfig, OnPendingSave
from forge.errors import ConfigError
from forge.jobdir.ledger import read
from forge.jobdir.ledger_writer import Ledger
from forge.training.metrics import Metrics
from forge.training.nan.nan_policy import NanPolicy
from forge.training.saver import SaveCause, Saver


@pytest.fixture
def make_saver(open_store):
    ledgers = []

    def make(keep_last=9, **config):
        store = open_store(keep_last=keep_last)
        ledgers.append(Ledger(store.directory))
        policy = CheckpointConfig(**config)
        metrics = Metrics(ledgers[-1])
        return Saver(store, policy, ledgers[-1], NanPolicy(NanConfig()), metrics), store

    yield make
    for ledger in ledgers:
        ledger.close()


@pytest.fixture
def busy(make_saver, monkeypatch):
    """A saver whose save of step 1 is being written until `release` is set."""
    made = []

    def make(**config):
        saver, store = make_saver(async_save=True, **config)
        commit, release, begun = store.commit, threading.Event(), threading.Event()

        def held(snapshot, *others):
            begun.set()
            assert release.wait(60)
            return commit(snapshot, *others)

        monkeypatch.setattr(store, "commit", held)
        weights = torch.ones(10)
        saver.save(1, lambda: {"w": weights}, SaveCause.periodic)
        assert begun.wait(60)
        made.append((saver, release))
        return saver, store, release, weights

    yield make
    for saver, release in made:
        release.set()
        saver.finish()


def steps(store):
    return sorted(int(path.name[5:]) for path in store.directory.glob("step_*"))


def test_skip_goes_on_training_and_tells(busy, caplog):
    """On a slow disk some would rather have fewer checkpoints than wait."""
    saver, store, release, _ = busy(on_pending_save=OnPendingSave.skip, every_steps=1)
    saver.save(2, lambda: pytest.fail("the state was taken for nothing"), SaveCause.periodic)
    release.set()
    saver.wait()
    assert steps(store) == [1]
    [event] = [e for e in read(store.directory).attempts[0].events if e["kind"] == "save_skipped"]
    assert (event["step"], event["busy_with"]) == (2, 1)
    assert "Skipped the save at step 2: the save of step 1" in caplog.text
    assert saver.considered == 2  # or the same boundary would decide on it again


@pytest.mark.parametrize(
    ("on_pending_save", "cause"),
    [(OnPendingSave.wait, SaveCause.periodic), (OnPendingSave.skip, SaveCause.requested)],
)
def test_wait_and_whoever_asked_for_a_save_get_theirs(on_pending_save, cause, busy):
    """`run.save()` is a promise; and by default every planned checkpoint is there."""
    saver, store, release, weights = busy(on_pending_save=on_pending_save)
    threading.Timer(0.05, release.set).start()
    saver.save(2, lambda: {"w": weights}, cause)
    saver.wait()
    assert steps(store) == [1, 2]


def test_a_stop_waits_for_the_one_in_flight_and_then_makes_its_own(busy):
    """Both are whole; the newer one holds what was trained since."""
    saver, store, release, weights = busy(on_pending_save=OnPendingSave.skip)
    weights.add_(1)
    threading.Timer(0.05, release.set).start()
    saver.save_final(2, lambda: {"w": weights}, SaveCause.stop)
    assert steps(store) == [1, 2]
    for step in (1, 2):
        found = store.read(store.directory / f"step_{step}").state["w"]
        assert torch.equal(found, torch.full((10,), float(step)))


def test_skip_and_rollback_do_not_go_together():
    """Where a rollback goes must not depend on how fast the disk was."""
    policy = {"nan": {"action": "rollback"}, "checkpoint": {"on_pending_save": "skip"}}
    with pytest.raises(ConfigError, match=r"resilience\.checkpoint\.on_pending_save=skip"):
        load(policy)
    load({**policy, "checkpoint": {"on_pending_save": "wait"}})


def test_the_save_at_a_stop_waits_for_the_room_that_removing_makes(make_saver, monkeypatch):
    """The disk may be full of what is being deleted this very moment."""
    saver, store = make_saver()
    commit, waited = store.commit, []

    def full(snapshot, *others):
        if not waited:
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(snapshot, *others)

    monkeypatch.setattr(store, "commit", full)
    monkeypatch.setattr(store, "wait", waited.append)
    saver.save_final(1, lambda: {"w": torch.ones(10)}, SaveCause.stop)
    assert steps(store) == [1]
    assert len(waited) == 1
    assert waited[0] > 0


def test_a_stop_leaves_removing_to_the_next_attempt(make_saver):
    """A process that deletes a large file is not gone before that is done."""
    saver, store = make_saver(keep_last=1)
    saver.save(1, lambda: {"x": 1}, SaveCause.periodic)
    saver.save_final(2, lambda: {"x": 2}, SaveCause.stop)
    assert steps(store) == [1, 2]
    saver.tidy()
    assert steps(store) == [2]
