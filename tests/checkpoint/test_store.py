"""Checkpoints that verify or do not exist, whatever happens to their files and to the disk."""

import errno
import gc
import json
import os
import random
import resource
import shutil
import sys
import zlib
from contextlib import nullcontext

import pytest
import torch
from stores import STATE, TENSORS, assert_holds, rewrite_manifest

from forge.checkpoint.format import manifest
from forge.config.schema import Verify
from forge.errors import CheckpointError, DamagedCheckpoint

FILES = [manifest.NAME, STATE, TENSORS]


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_is_ever_loaded(name, store, commit, state_of):
    """Disks and networks flip bits; training on from them would be silently wrong."""
    path = commit(store, 1) / name
    original = path.read_bytes()
    expected = store.newest()
    rng = random.Random(name)
    for _ in range(150):
        flip(path, rng)
        try:
            found = store.read(path.parent)
        except DamagedCheckpoint:
            pass
        else:  # a flip that changes no value (a letter's case in a JSON escape) does no harm
            assert found.manifest == expected.manifest
            assert str(found.state) == str(expected.state)
        path.write_bytes(original)
    assert_holds(store, 1, state_of)


@pytest.mark.parametrize("name", FILES)
def test_no_truncated_file_is_ever_loaded(name, store, commit):
    """A power cut or a full disk can truncate a file."""
    path = commit(store, 1) / name
    original = path.read_bytes()
    for size in {0, 1, 7, 8, 9, len(original) // 2, len(original) - 1}:
        path.write_bytes(original[:size])
        with pytest.raises(DamagedCheckpoint, match=r"manifest|expected \d+ bytes"):
            store.read(path.parent)
    path.write_bytes(original + b"\0")
    with pytest.raises(DamagedCheckpoint):
        store.read(path.parent)


REPLACEMENTS = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a symlink to itself": lambda path: path.symlink_to(path.name),
    "a symlink to the real file": lambda path: path.symlink_to(path.with_name("moved")),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("verify", ["full", "none"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_what_is_no_plain_file_is_damage_and_blocks_nobody(kind, name, verify, open_store, commit):
    """Opening a FIFO waits forever; a directory raises something else than a file does."""
    store = open_store(verify=Verify[verify])
    path = commit(store, 1) / name
    path.rename(path.with_name("moved"))
    REPLACEMENTS[kind](path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DamagedCheckpoint):
        store.read(path.parent)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(CheckpointError, match="can be used"):
        store.newest()


@pytest.mark.parametrize("name", FILES)
def test_a_sparse_terabyte_is_refused_without_memory(name, store, commit):
    """A size that a damaged file system reports must not take the node down."""
    path = commit(store, 1) / name
    os.truncate(path, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpoint):
        store.read(path.parent)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step_is_damage(name, store, commit):
    """The file has the same size and is valid, but was committed in another checkpoint."""
    one, two = commit(store, 1), commit(store, 2)
    assert (one / name).read_bytes() != (two / name).read_bytes()
    shutil.copy(one / name, two / name)
    with pytest.raises(DamagedCheckpoint):
        store.read(two)


def test_a_whole_checkpoint_under_another_name_is_damage(store, commit):
    """A copied directory would make a run believe that it is further than it is."""
    one = commit(store, 1)
    shutil.copytree(one, one.with_name("step_9"))
    one.with_name("step_8").symlink_to(one.name)
    assert store.newest().manifest.step == 1
    assert len(store.passed_over) == 2
    assert all("found that of step 1" in reason for reason in store.passed_over)


GOOD = {"size": 1, "chunks": [1]}


@pytest.mark.parametrize(
    "changes",
    [
        *({"files": {name: GOOD}} for name in ("../x", "/etc/passwd", "a/b", "..", ".", "", "x\0")),
        {"files": {manifest.NAME: GOOD}},
        {"files": {"\ud800": GOOD}},
        {"files": {}},
        {"files": {STATE: GOOD}},
        {"files": [STATE, TENSORS]},
        {"files": None},
        {"files": {STATE: {}, TENSORS: {}}},
        {"files": {STATE: None, TENSORS: None}},
        {"files": {STATE: {"size": -1, "chunks": [1]}, TENSORS: GOOD}},
        {"files": {STATE: {"size": "9", "chunks": [1]}, TENSORS: GOOD}},
        {"files": {STATE: {"size": 1e300, "chunks": [1]}, TENSORS: GOOD}},
        {"step": "1"},
        {"step": 2},
        {"step": None},
        {"format": 1},
        {"format": None},
        {"no_such_field": 1},
        {"step": 1.0},
        {"step": True},
        {"is_complete": "no"},
        {"attempt": None},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_no_manifest_says_is_damage(changes, store, commit):
    """The manifest's own checksum can match; forge opens nothing outside the directory."""
    path = commit(store, 1)
    rewrite_manifest(path, **changes)
    with pytest.raises(DamagedCheckpoint):
        store.read(path)
    assert not store.holds(1) or changes.get("files") in ({}, {STATE: GOOD})


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100000, b"{}"]
)
def test_a_manifest_that_is_something_else_is_damage(content, store, commit):
    """The file can contain any bytes."""
    path = commit(store, 1)
    (path / manifest.NAME).write_bytes(content)
    gc.disable()  # finalizers of what other tests have left would run where no stack is left
    try:
        with pytest.raises(DamagedCheckpoint):
            store.read(path)
    finally:
        gc.enable()


def test_bytes_that_are_no_tensor_file_are_damage_even_unverified(open_store, commit, state_of):
    """With `verify=size` no checksum is verified, so the parser itself must detect damage."""
    store = open_store(verify=Verify.size)
    path = commit(store, 1) / TENSORS
    original = path.read_bytes()
    rng = random.Random(5)
    told = []
    for _ in range(300):
        content = bytearray(original)
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(120)] = rng.randrange(256)
        path.write_bytes(content)
        try:
            found = store.read(path.parent).state
        except DamagedCheckpoint as error:
            told.append(str(error))
        else:  # bytes of the header that say nothing about a tensor
            assert torch.equal(found.pop("weights"), state_of(1)["weights"])
            assert found == {"step": 1, "names": ["a", "b"]}
    misnamed = f"{TENSORS} has no tensor 'weights'"
    assert {text for text in told if not text.startswith(f"{TENSORS} is not a valid")} == {misnamed}
    assert 280 < len(told) < 300


def test_a_disk_that_cannot_be_read_is_damage_and_the_older_one_is_taken(
    store, commit, monkeypatch, state_of
):
    """A bad sector must cost an interval, not the run."""
    commit(store, 1)
    commit(store, 2)
    preadv = os.preadv
    calls = []

    def fail_first(fd, buffers, offset):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail_first)
    assert_holds(store, 1, state_of)
    assert "Input/output error" in store.passed_over[0]


def test_a_read_that_stops_halfway_is_gone_on_with(store, commit, monkeypatch, state_of):
    """Network file systems can return fewer bytes than requested; this is not damage."""
    commit(store, 1)
    commit(store, 2)
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 100)))
    assert_holds(store, 2, state_of)
    assert store.passed_over == []
    assert store.holds(2)


@pytest.mark.parametrize("spared", [400, 20])
def test_a_state_too_deep_to_decode_is_damage(spared, store, commit):
    """JSON can be nested deeper than Python's recursion limit, in `json` or after it."""
    path = commit(store, 1)
    depth = sys.getrecursionlimit() - spared
    deep = b"[" * depth + b"]" * depth
    (path / STATE).write_bytes(deep)
    entry = {"size": len(deep), "chunks": [zlib.crc32(deep)]}
    files = json.loads((path / manifest.NAME).read_bytes())["files"]
    rewrite_manifest(path, files={**files, STATE: entry})
    is_sure = spared == 20 or sys.version_info < (3, 12)  # later ones need fewer frames
    with (
        pytest.raises(DamagedCheckpoint, match=r"recursion|too deep") if is_sure else nullcontext()
    ):
        store.read(path)


# -- which one is taken ----------------------------------------------------------------------------


def test_the_newest_that_verifies_is_taken_and_the_others_are_explained(store, commit, state_of):
    """If forge skipped damage silently, nobody could repair it."""
    for step in (3, 20, 100, 1000):
        commit(store, step)
    flip(store.directory / "step_1000" / TENSORS, random.Random(1))
    (store.directory / "step_100" / manifest.NAME).unlink()
    assert_holds(store, 20, state_of)
    assert [reason.split(":")[0] for reason in store.passed_over] == ["step_1000", "step_100"]
    assert "CRC-32" in store.passed_over[0]
    assert "no manifest" in store.passed_over[1]


def test_when_all_are_damaged_it_is_an_error_that_names_all(store, commit):
    """A silent fresh start would throw weeks away."""
    for step in (1, 2):
        (commit(store, step) / STATE).unlink()
    with pytest.raises(CheckpointError, match=r"(?s)step_2: .*step_1: .*move these directories"):
        store.newest()


def test_an_empty_directory_is_a_fresh_start(store):
    """The one case where it is."""
    assert store.newest() is None


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(store, commit, state_of):
    """Otherwise every later start would skip this checkpoint."""
    commit(store, 1)
    flip(commit(store, 2) / TENSORS, random.Random(1))
    assert_holds(store, 1, state_of)
    assert not store.holds(2)
    commit(store, 2)
    assert store.holds(2)
    assert_holds(store, 2, state_of)


def test_a_checkpoint_is_marked_when_its_training_is_finished(store, commit):
    """A stop in the last step saves, and the end of the training must still be recorded."""
    commit(store, 1, {"loss": (1, 0.5)})
    assert not store.newest().manifest.is_complete
    store.mark_complete(1)
    assert store.newest().manifest.is_complete
    assert store.newest().manifest.metrics == {"loss": 0.5}
    store.mark_complete(1, {"loss": (1, 0.25)})
    assert store.newest().manifest.metrics == {"loss": 0.25}
    assert store.holds(1)
