"""A save that is due while another one is still being written beside training."""

import threading

import pytest
import torch

from forge.config import CheckpointConfig, NanConfig, WhenBusy, load
from forge.errors import ConfigError
from forge.ledger import Ledger, read
from forge.nan_policy import NanPolicy
from forge.saver import Saver


@pytest.fixture
def busy(open_store, monkeypatch):
    """A saver whose save of step 1 is being written until `release` is set."""
    made = []

    def make(**config):
        store = open_store(keep_last=9)
        ledger = Ledger(store.directory)
        policy = CheckpointConfig(async_save=True, **config)
        saver = Saver(store, policy, ledger, NanPolicy(NanConfig()))
        commit, release, begun = store.commit, threading.Event(), threading.Event()

        def held(snapshot):
            begun.set()
            assert release.wait(60)
            return commit(snapshot)

        monkeypatch.setattr(store, "commit", held)
        weights = torch.ones(10)
        saver.save(1, lambda: {"w": weights}, "periodic")
        assert begun.wait(60)
        made.append((saver, ledger, release))
        return saver, store, release, weights

    yield make
    for saver, ledger, release in made:
        release.set()
        saver.finish()
        ledger.close()


def steps(store):
    return sorted(int(path.name[5:]) for path in store.directory.glob("step_*"))


def test_skip_goes_on_training_and_tells(busy, caplog):
    """On a slow disk some would rather have fewer checkpoints than wait."""
    saver, store, release, _ = busy(when_busy=WhenBusy.skip, every_steps=1)
    saver.save(2, lambda: pytest.fail("the state was taken for nothing"), "periodic")
    release.set()
    saver.wait()
    assert steps(store) == [1]
    [event] = [e for e in read(store.directory).attempts[0].events if e["kind"] == "save_skipped"]
    assert (event["step"], event["busy_with"]) == (2, 1)
    assert "The save at step 2 is skipped: the one of step 1" in caplog.text
    assert saver.is_due(3)


@pytest.mark.parametrize(
    ("when_busy", "reason"), [(WhenBusy.wait, "periodic"), (WhenBusy.skip, "requested")]
)
def test_wait_and_whoever_asked_for_a_save_get_theirs(when_busy, reason, busy):
    """`run.save()` is a promise; and by default every planned checkpoint is there."""
    saver, store, release, weights = busy(when_busy=when_busy)
    threading.Timer(0.05, release.set).start()
    saver.save(2, lambda: {"w": weights}, reason)
    saver.wait()
    assert steps(store) == [1, 2]


def test_a_stop_waits_for_the_one_in_flight_and_then_makes_its_own(busy):
    """Both are whole; the newer one holds what was trained since."""
    saver, store, release, weights = busy(when_busy=WhenBusy.skip)
    weights.add_(1)
    threading.Timer(0.05, release.set).start()
    saver.save_final(2, lambda: {"w": weights}, False, "SIGTERM")
    assert steps(store) == [1, 2]
    for step in (1, 2):
        found = store.read(store.directory / f"step_{step}").state["w"]
        assert torch.equal(found, torch.full((10,), float(step)))


def test_skip_and_rollback_do_not_go_together():
    """Where a rollback goes must not depend on how fast the disk was."""
    policy = {"nan": {"action": "rollback"}, "checkpoint": {"when_busy": "skip"}}
    with pytest.raises(ConfigError, match=r"resilience\.checkpoint\.when_busy=skip"):
        load(policy)
    load({**policy, "checkpoint": {"when_busy": "wait"}})
