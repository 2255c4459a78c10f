"""Checkpoint stores, each in its own directory, that are closed at the end of the test."""

import functools

import pytest
from stores import commit, state_of

from forge.checkpoint import files, staging, writing
from forge.checkpoint import store as store_module
from forge.checkpoint.format import manifest
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig


@pytest.fixture
def open_store(tmp_path):
    opened = []

    def open_one(directory=tmp_path / "checkpoints", keep_back_steps=None, **config):
        config = CheckpointConfig(**{"every_steps": None, **config})
        store = Store(directory, config, keep_back_steps=keep_back_steps)
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
    for module in (manifest, staging, writing, files):
        monkeypatch.setattr(module, "CHUNK", 1 << 12)
    described = functools.partial(manifest.Manifest, chunk_bytes=1 << 12)
    monkeypatch.setattr(store_module, "Manifest", described)
    monkeypatch.setattr(files, "_READ", 1 << 9)
    monkeypatch.setattr(files, "_DIRECT", 1 << 7)
    monkeypatch.setattr(files, "num_threads", lambda: 3)
