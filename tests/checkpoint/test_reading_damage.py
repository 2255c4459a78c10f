"""Damaged files, and files that change or shrink while forge reads them into live tensors."""

import copy
import gc
import json
import os
import random

import pytest
from placed import (
    adam,
    content,
    newest,
    pair,
    resume,
    save,
)
from stores import TENSORS, rewrite_manifest
from torch import nn

from forge.checkpoint.format.manifest import entry_of
from forge.errors import CheckpointError, DamagedCheckpoint, ExitCode, StateMismatch
from forge.state import restoring
from forge.state.registry import StateRegistry

# -- damage ----------------------------------------------------------------------------------------


def test_the_older_one_is_taken_with_nothing_live_changed(small_chunks, store, monkeypatch):
    """Whichever bit is flipped, the live tensors must not get a part of the newer state."""
    older, newer, live = pair(1), pair(2), pair(3)
    save(store, older, 1)
    path = save(store, newer, 2) / TENSORS
    original, before = path.read_bytes(), content(live)
    rng = random.Random(1)
    places = [0, 8, 100, len(original) - 1, *(rng.randrange(len(original)) for _ in range(20))]
    for place in places:
        damaged = bytearray(original)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = newest(store, live)
        assert found.path.name == "step_1"
        assert "step_2: " in store.passed_over[0]
        assert content(live) == before, place
    restoring.load(live, found.state["live"], found.fill())
    assert content(live) == content(older)


def test_a_misfit_changes_nothing_and_damage_is_no_misfit(small_chunks, store):
    """A flipped bit in a shape must count as damage, not as a checkpoint that does not fit."""
    old = pair(1)
    path = save(store, old) / TENSORS
    other = StateRegistry({"model": nn.Linear(3, 3), "optimizer": adam(nn.Linear(3, 3))})
    before = content(other)
    with pytest.raises(
        StateMismatch, match=r"model\.0\.weight: .* checkpoint, nothing in the object"
    ):
        newest(store, other)
    assert content(other) == before
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"[40, 30]", b"[30, 40]", 1))
    assert path.read_bytes() != raw
    with pytest.raises(CheckpointError, match=r"step_1: tensors_.* the content has changed"):
        newest(store, pair(2))


def resign(path):
    """Put the checksum of the present file into the manifest."""
    manifest = json.loads((path.parent / "manifest.json").read_bytes())
    manifest["files"][path.name] = entry_of(path.read_bytes())
    rewrite_manifest(path.parent, files=manifest["files"])


def test_a_header_of_nonsense_is_damage(small_chunks, store):
    """A bug in a writer can leave one with a valid checksum: no crash, and no huge allocation."""
    live = pair(1)
    path = save(store, live) / TENSORS
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    rng = random.Random(1)
    values = [-1, 0, 1, 7, 1 << 40, 1 << 62, 1 << 70, 0.5, None, "x", [], {}, True]
    num_damaged = 0
    for _ in range(60):
        changed = copy.deepcopy(header)
        name = rng.choice([name for name in header if name != "__metadata__"])
        entry, value = changed[name], rng.choice(values)
        match rng.randrange(6):
            case 0:
                entry["data_offsets"][rng.randrange(2)] = value
            case 1:
                entry["shape"] = [value, *entry["shape"][1:]]
            case 2:
                entry["dtype"] = rng.choice(["F64", "BOOL", "F8_E5M2", "nonsense", value])
            case 3:
                changed[name] = value
            case 4:
                entry.pop(rng.choice(list(entry)))
            case 5:
                changed["__metadata__"] = {"complex128": rng.choice([f'["{name}"]', "5", value])}
        text = json.dumps(changed).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        resign(path)
        before = content(live)
        try:
            store.read(
                path.parent, offer=lambda state: restoring.in_place_targets(live, state["live"])
            )
        except (DamagedCheckpoint, StateMismatch):
            num_damaged += 1
        assert content(live) == before
    assert num_damaged > 40


def test_a_header_that_changes_between_two_looks_is_damage(store, monkeypatch):
    """The header that is parsed has to be the header whose checksum was verified."""
    live = pair(1)
    path = save(store, live) / TENSORS
    size, pread = path.stat().st_size, os.pread

    def other_first(fd, count, offset):
        found = pread(fd, count, offset)
        is_header = os.fstat(fd).st_size == size and count > 8
        return found[:-1] + b"\n" if is_header and found.endswith(b" ") else found

    monkeypatch.setattr(os, "pread", other_first)
    with pytest.raises(CheckpointError, match="its header changed"):
        newest(store, live)


def test_a_file_that_shrinks_while_it_is_read_is_damage(small_chunks, store, monkeypatch):
    """With mmap, reading past the new end would kill the process with SIGBUS."""
    live = pair(1)
    save(store, live, 1)
    path = save(store, live, 2) / TENSORS
    before = content(live)
    preadv, calls = os.preadv, []

    def shrink(fd, views, offset):
        calls.append(offset)
        if offset >= 4096 and path.stat().st_size > 5000:
            os.truncate(path, 5000)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", shrink)
    assert newest(store, live).path.name == "step_1"
    assert "ends after" in store.passed_over[0]
    assert content(live) == before


@pytest.mark.parametrize("how", ["shrinks", "cannot be read", "is written to"])
def test_a_failure_while_live_tensors_are_filled_says_that_they_are_lost(
    small_chunks, store, monkeypatch, how
):
    """The run ends with code 74, since the live tensors can have parts of a checkpoint."""
    live = pair(1)
    path = save(store, live) / TENSORS
    found = newest(store, live)
    if how == "shrinks":
        os.truncate(path, path.stat().st_size - 5000)
    elif how == "is written to":
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        path.write_bytes(changed)
    else:

        def fail(fd, views, offset):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="training cannot continue") as error:
        found.fill()
    assert error.value.exit_code == ExitCode.IO_ERROR
    assert not isinstance(error.value, DamagedCheckpoint), "no older one may be taken now"


def test_short_reads_are_gone_on_with(small_chunks, store, monkeypatch):
    """Network file systems and signals can shorten any read."""
    preadv, rng = os.preadv, random.Random(1)

    def cut(fd, views, offset):
        count = rng.randrange(1, sum(map(len, views)) + 1)
        taken = []
        for view in views:
            taken.append(view[:count])
            count -= len(taken[-1])
        return preadv(fd, [view for view in taken if len(view)], offset)

    old, new = pair(1), pair(2)
    save(store, old)
    monkeypatch.setattr(os, "preadv", cut)
    resume(store, new)
    assert content(new) == content(old)
    fresh = pair(3, num_steps=0)
    resume(store, fresh)
    assert content(fresh) == content(old)


def test_no_file_stays_open(store):
    """A sweep in one process loads thousands of checkpoints."""
    live = pair(1)
    save(store, live)
    gc.collect()  # closes files that earlier tests left open
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        newest(store, live)  # without a call of `fill`: the open file must be closed without it
    resume(store, live)
    assert len(os.listdir("/proc/self/fd")) == num_open
