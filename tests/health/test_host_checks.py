"""Checks of a node by itself, and of its file system."""

import errno
import os

import pytest

from forge.config.schema import CheckConfig
from forge.errors import DiskFull
from forge.health import host, storage
from forge.health.check import Context
from forge.health.table import CHECKS
from forge.jobdir.job_files import forge_dir


def context(folder, threshold=None, **given):
    return Context(CheckConfig(threshold=threshold), folder, folder, **given)


@pytest.fixture
def job(tmp_path):
    forge_dir(tmp_path).mkdir()
    return tmp_path


def test_a_healthy_node_passes(job):
    for look in (storage.disk, storage.inodes, host.shm):
        found = look(context(job, 0.0))
        assert found is None or not found.is_failed, found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_where_the_policy_sets_no_threshold_nothing_fails(job, check):
    """`threshold: null` is no threshold of 0."""
    found = check.look(context(job))
    assert found is None or not found.is_failed, found


def test_a_directory_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").touch()
    found = storage.disk(context(tmp_path / "file", 0.0))
    assert found.is_failed
    assert "cannot be written" in found.value


def test_a_directory_that_is_not_there_yet_counts_as_the_one_above_it(tmp_path):
    """By hand nobody has made it."""
    found = storage.disk(context(tmp_path / "a" / "b", 0.0))
    assert not found.is_failed
    assert list(tmp_path.iterdir()) == []


def test_room_is_counted_in_checkpoints_as_large_as_the_newest(tmp_path):
    """The first one is as large as what is to be saved."""
    assert storage.room(context(tmp_path, 2.0)) is None
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert storage.room(context(tmp_path, 2.0, state_bytes=free)).is_failed
    for step, size in ((4, 5000), (12, 100)):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "tensors").write_bytes(bytes(size))
    assert storage.newest_bytes(tmp_path) == 100
    assert not storage.room(context(tmp_path, 2.0, state_bytes=free)).is_failed


def test_a_full_disk_is_no_fault_of_the_node(tmp_path, monkeypatch):
    """The job ends with 71, and no node is excluded for it."""

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="No space left"):
        storage.disk(context(tmp_path, 0.0))


def test_a_file_system_without_a_limit_has_room(tmp_path, monkeypatch):
    """`tmpfs -o size=0`: it says that it has no blocks, and none is free."""
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: nothing)
    assert host.shm(context(tmp_path, 1.0)) is None
    assert storage.room(context(tmp_path, 2.0, state_bytes=100)) is None
    assert storage.inodes(context(tmp_path, 1e4)) is None
