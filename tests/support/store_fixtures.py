"""Checkpoint stores, each in its own directory, that are closed at the end of the test."""

import pytest
from stores import commit, state_of

from forge.checkpoint import Store
from forge.checkpoint.format import checksums
from forge.checkpoint.io import output
from forge.checkpoint.load import file_reading
from forge.checkpoint.save import staged_file
from forge.config.schema import CheckpointConfig


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def open_one(directory=tmp_path / "checkpoints", keep_back_steps=None, **config):
        store = Store(directory, CheckpointConfig(**config), keep_back_steps=keep_back_steps)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store(keep_last=100)


@pytest.fixture(name="commit")
def _commit():
    return commit


@pytest.fixture(name="state_of")
def _state_of():
    return state_of


@pytest.fixture
def small_chunks(monkeypatch):
    """With small chunks, files of some kilobytes have many chunks, and several threads."""
    for module in (checksums, staged_file, output, file_reading):
        monkeypatch.setattr(module, "CHUNK", 1 << 12)
    monkeypatch.setattr(file_reading, "_STEP", 1 << 9)
    monkeypatch.setattr(file_reading, "_DIRECT", 1 << 7)
    monkeypatch.setattr(file_reading, "num_threads", lambda: 3)
