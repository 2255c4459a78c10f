"""`job.json`: its content, when forge writes it, and what happens if it is damaged."""

import contextlib
import json
import os

import pytest
import torch

from forge.checkpoint.format.manifest import Origin
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.errors import CheckpointError, ConfigError
from forge.jobdir import config_file, identity
from forge.jobdir.ledger_writer import Ledger
from forge.state.initial_hyperparameters import InitialHyperparameters
from forge.training.start import checkpoint_owner as owners
from forge.training.start.checkpoint_owner import CheckpointOwner


class Place:
    """A checkpoint directory, and jobs that use it; `start` is one start of a job."""

    def __init__(self, folder):
        self.folder = folder
        self.checkpoints = folder / "ck"
        self.record = self.checkpoints / "job.json"
        self.said = []

    def start(self, step=None, lr=0.1, out="out", take=False, objects=None, **config):
        """Claim, load the newest checkpoint, save `step`; returns the optimizer's first group."""
        job = self.folder / out
        config_file.write(job / ".forge" / identity.START, {"written": {"lr": lr, **config}})
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        objects = {"model": model, "optimizer": optimizer, **(objects or {})}
        store = Store(self.checkpoints, CheckpointConfig())
        with contextlib.closing(store), contextlib.closing(Ledger(job)) as ledger:
            built = InitialHyperparameters(objects)
            owner = CheckpointOwner(self.checkpoints, job, "", built, is_change_wanted=take)
            found = store.newest()
            if found:
                owner.check_known(found.manifest.job)
                optimizer.load_state_dict(found.state["states"]["optimizer"])
            owner.keep(ledger)
            if step is not None:
                state = {"states": {n: o.state_dict() for n, o in objects.items()}}
                origin = Origin(job=owner.id)
                store.commit(store.snapshot(step, state, copy=False, origin=origin))
        return optimizer.param_groups[0]

    @property
    def rates(self):
        return [job["config"]["lr"] for job in json.loads(self.record.read_text())["jobs"]]


@pytest.fixture
def place(tmp_path, monkeypatch):
    found = Place(tmp_path)
    monkeypatch.setattr("forge.messages.say", lambda text, level=0: found.said.append(text))
    return found


def test_another_config_is_refused_until_it_is_taken_on(place):
    place.start(1)
    with pytest.raises(ConfigError, match=r"lr: 0.1 before, 0.2 now"):
        place.start(2, lr=0.2)
    place.said.clear()
    assert place.start(2, lr=0.2, take=True)["lr"] == 0.1  # the checkpoint's
    assert "optimizer.param_groups[0].lr: 0.1 before, 0.2 now" in place.said[0]
    assert place.rates == [0.1, 0.2]
    with pytest.raises(ConfigError, match=r"lr: 0.2 before, 0.1 now"):
        place.start(3)


def test_the_checkpoint_of_an_earlier_config_is_known(place):
    """The newest checkpoint can be damaged, and the one before can be of an earlier config."""
    place.start(1)
    place.start(2, lr=0.2, take=True)
    next(place.checkpoints.glob("step_2/tensors*")).write_bytes(b"")
    assert place.start(lr=0.2)["lr"] == 0.1
    assert place.start(3, take=True)["lr"] == 0.1  # the first config again, with its own checkpoint
    assert place.rates == [0.2, 0.1]


def test_what_training_has_changed_stays_where_the_script_has_not(place):
    place.start(1)
    place.start(2, decay=0.5, take=True)
    assert place.start(decay=0.5)["momentum"] == 0.5
    assert not any("momentum" in text for text in place.said)


def test_nothing_is_protected_before_the_first_checkpoint(place):
    place.start()
    place.start(lr=0.2)
    assert place.rates == [0.2]


def test_the_same_job_is_not_written_again(place):
    """Otherwise a full disk would end a resume that has nothing to write."""
    place.start(1)
    before = os.stat(place.record).st_ino
    place.start(2)
    assert os.stat(place.record).st_ino == before


def test_rates_that_only_the_code_has_changed_are_named(place):
    """The config and therefore the job are the same, but loading restores the old rate."""
    place.start(1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=5.0)
    place.start(2, objects={"other": torch.optim.SGD(optimizer.param_groups[0]["params"], lr=1.0)})
    place.said.clear()
    place.start(3, objects={"optimizer": optimizer})
    assert "optimizer.param_groups[0].lr: 0.1 before, 5.0 now" in place.said[0]


@pytest.mark.parametrize("damage", ["missing", "empty", "edited", "not text"])
def test_a_damaged_record_is_made_anew_or_refused(place, damage):
    """The newest checkpoint identifies the job."""
    place.start(1)
    text = place.record.read_text()
    if damage == "missing":
        place.record.unlink()
    else:
        edited = text.replace('"lr": 0.1', '"lr": 0.2')
        assert edited != text
        place.record.write_bytes({"empty": b"", "edited": edited.encode()}.get(damage, b"\xff"))
    with pytest.raises(CheckpointError, match=r"job\.json is (missing|damaged)"):
        place.start(2, lr=0.2)
    with pytest.raises(CheckpointError, match="Restore a copy of the file"):
        place.start(2, lr=0.2, take=True)
    place.start(2)
    assert any("forge writes it again" in text for text in place.said)
    assert place.record.read_text() == text


def test_a_checkpoint_of_another_job_that_was_put_there_is_refused(place):
    place.start(1)
    other = Place(place.folder / "other")
    other.start(7, lr=0.2)
    (other.checkpoints / "step_7").rename(place.checkpoints / "step_7")
    with pytest.raises(CheckpointError, match="saved by another job"):
        place.start(8)


def test_a_full_disk_leaves_the_record_as_it_was(place, monkeypatch):
    place.start(1)
    text = place.record.read_text()

    def full(path, content, **options):
        if path.name != "job.json":
            return real(path, content, **options)
        raise OSError(28, "No space left on device", str(path))

    real = owners.write_atomically
    monkeypatch.setattr(owners, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        place.start(2, lr=0.2, take=True)
    assert place.record.read_text() == text
