"""A manipulated checkpoint does no harm to the job that reads it."""

import dataclasses
import json
import os
import resource

import pytest
import torch

from forge.checkpoint.format import encoding, manifest, tensorfile
from forge.checkpoint.format.manifest import STATE, TENSORS, Manifest, entry_of, num_chunks
from forge.errors import CheckpointError, DamagedCheckpoint


@pytest.fixture
def filled(open_store, commit):
    """A directory with the steps 1 and 2, which no store has claimed."""
    store = open_store()
    for step in (1, 2):
        commit(store, step)
    store.close()
    return store.directory


def rewrite(path, **changes):
    """A manifest that holds together, with these entries of files changed."""
    raw = json.loads((path / manifest.NAME).read_bytes())
    del raw["checksum"]
    raw["files"].update(changes.pop("files", {}))
    described = dataclasses.replace(Manifest(**raw), **changes)
    (path / manifest.NAME).write_bytes(described.to_bytes())


def hollow_entry(size):
    return {"size": size, "chunks": [0] * num_chunks(size)}


def hollow(path, name, size):
    """A file of that size that takes no room, and an entry that fits it but for the checksums."""
    os.truncate(path / name, size)
    rewrite(path, files={name: hollow_entry(size)})


def replaced(path, name, content):
    (path / name).write_bytes(content)
    rewrite(path, files={name: entry_of(content)})


def linked(path):
    (path / TENSORS).rename(path.parent / "elsewhere")
    (path / TENSORS).symlink_to(path.parent / "elsewhere")


header = b'{"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'
HOSTILE = {
    "state of 100 GB": (lambda p: hollow(p, STATE, 100 << 30), "at most 1073741824 bytes"),
    "state that is deep": (lambda p: replaced(p, STATE, b"[" * 10**6), "cannot be read"),
    "state with a deep value": (
        lambda p: replaced(p, STATE, b"[" * 600 + b"]" * 600),
        "nested too deeply|cannot be read|no attribute|not a mapping",
    ),
    "state that is no UTF-8": (lambda p: replaced(p, STATE, b'{"a": "\xff"}'), "cannot be read"),
    "header of 100 MiB": (
        lambda p: replaced(p, TENSORS, (100 << 20).to_bytes(8, "little") + b" " * (100 << 20)),
        "header of at most 100000000 bytes, found 104857600",
    ),
    "deep header": (
        lambda p: replaced(p, TENSORS, (10**5).to_bytes(8, "little") + b"[" * 10**5),
        "is not a valid safetensors file",
    ),
    "a path upwards": (
        lambda p: rewrite(p, files={"../x": entry_of(b"")}),
        "does not name two files for each of 1 ranks",
    ),
    "an absolute path": (
        lambda p: rewrite(p, files={"/etc/passwd": entry_of(b"")}),
        "does not name two files for each of 1 ranks",
    ),
    "a link out": (linked, "is not a regular file|cannot be opened"),
    "a size that is not there": (
        lambda p: rewrite(p, files={TENSORS: hollow_entry(1 << 40)}),
        f"{TENSORS}: expected {1 << 40} bytes, found",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_checkpoint_is_damage_and_takes_no_memory(case, filled, open_store):
    """forge checks and limits sizes before it allocates memory for them."""
    harm, complaint = HOSTILE[case]
    harm(filled / "step_2")
    store = open_store(filled)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpoint, match=complaint):
        store.read(filled / "step_2")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert store.newest().manifest.step == 1


def test_more_metrics_than_would_be_read_again_are_refused_as_they_are_written(
    store, commit, monkeypatch
):
    """Without the limit, forge would write checkpoints that it can neither read nor remove."""
    commit(store, 1)
    logged = {f"sample_{i}/loss": (1, 0.5) for i in range(2_000)}
    commit(store, 2, logged)
    assert store.newest().manifest.metrics["sample_9/loss"] == 0.5
    monkeypatch.setattr(manifest, "MAX_BYTES", 1 << 16)
    with pytest.raises(CheckpointError, match=r"run\.log got 2000 different names"):
        commit(store, 3, logged)
    assert [path.name for path in store.directory.glob("*step_3*")] == []
    monkeypatch.undo()
    assert store.newest().manifest.step == 2


def test_a_manifest_of_forty_thousand_metrics_is_read_again(store, commit):
    """An evaluation that logs every sample is no reason to lose the run."""
    name = "validation/" + "a" * 200
    logged = {f"{name}/{i}": (1, 0.5) for i in range(40_000)}
    assert (commit(store, 1, logged) / manifest.NAME).stat().st_size > 16 << 20
    assert len(store.newest().manifest.metrics) == 40_000


@pytest.mark.parametrize("limit", ["MAX_HEADER", "MAX_STATE_BYTES"])
def test_more_than_would_be_read_again_is_refused_at_the_start(limit, store, monkeypatch):
    """Not at the first save, hours later; and never at a resume."""
    state = {"tensors": {str(i): torch.ones(()) for i in range(100)}, "text": "a" * 8000}
    module = tensorfile if limit == "MAX_HEADER" else encoding
    store.check_savable(state)
    monkeypatch.setattr(module, limit, 6000)
    with pytest.raises(CheckpointError, match=r"the limit is 6000\. Let state_dict"):
        store.check_savable(state)
    with pytest.raises(CheckpointError, match="Let state_dict"):
        store.commit(store.snapshot(1, state, copy=False))
