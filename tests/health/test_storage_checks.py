"""Checks of the checkpoints' file system and of /dev/shm."""

import errno
import os

import pytest

from forge.errors import DiskFull
from forge.health import storage
from forge.health.check import Context


def statvfs(free_gib=1000, inodes=(10**6, 10**6)):
    """What a file system with 4 TiB says; inodes are those that there are, and the free ones."""
    blocks = free_gib * 2**18
    return os.statvfs_result((4096, 4096, 2**30, blocks, blocks, *inodes, inodes[1], 0, 255))


def played(monkeypatch, **given):
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(**given))


def test_a_directory_that_takes_a_file_passes_and_keeps_nothing(tmp_path, monkeypatch):
    """One that is not there yet counts as the one above it: by hand nobody has made it."""
    played(monkeypatch)
    finding = storage.disk(Context(tmp_path / "a" / "b", tmp_path))
    assert (finding.is_failed, finding.value) == (False, f"1000.0 GiB free in {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").touch()
    finding = storage.disk(Context(tmp_path / "file", tmp_path))
    assert (finding.is_failed, finding.only_warns) == (True, False)
    assert "cannot be written" in finding.value


def test_a_full_disk_is_no_fault_of_the_node(tmp_path, monkeypatch):
    """The job ends with 71, and no node is excluded for it."""

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="No space left"):
        storage.disk(Context(tmp_path, tmp_path))


def test_room_is_counted_in_checkpoints_as_large_as_the_newest(tmp_path, monkeypatch):
    """The first one is as large as what is to be saved; another node has no more room."""
    played(monkeypatch, free_gib=1)
    context = Context(tmp_path, tmp_path, state_bytes=2**30)
    finding = storage.disk(context)
    assert (finding.is_failed, finding.only_warns) == (True, True)
    assert finding.value.startswith("space for 1.0 more checkpoints of 1.0 GiB, less than 2")
    for step, size in ((4, 5000), (12, 100)):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "tensors").write_bytes(bytes(size))
    assert not storage.disk(context).is_failed


def test_few_inodes_only_warn(tmp_path, monkeypatch):
    played(monkeypatch, inodes=(10**6, 9999))
    finding = storage.disk(Context(tmp_path, tmp_path))
    assert (finding.is_failed, finding.only_warns) == (True, True)
    assert finding.value == f"9999 free inodes in {tmp_path}, less than 10000"


def test_a_small_shm_fails(tmp_path, monkeypatch):
    played(monkeypatch, free_gib=0)
    assert storage.shm(Context(tmp_path, tmp_path)).is_failed
    played(monkeypatch, free_gib=1)
    assert not storage.shm(Context(tmp_path, tmp_path)).is_failed


def test_a_file_system_without_a_limit_has_room(tmp_path, monkeypatch):
    """`tmpfs -o size=0`: it says that it has no blocks, and none is free."""
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: nothing)
    assert storage.shm(Context(tmp_path, tmp_path)) is None
    assert not storage.disk(Context(tmp_path, tmp_path, state_bytes=100)).is_failed
