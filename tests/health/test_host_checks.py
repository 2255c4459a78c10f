"""Checks of a node by itself, and of its file system."""

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from started import Popen

from forge.config.schema import CheckConfig
from forge.errors import DiskFull
from forge.health import host, peers, storage, used_memory
from forge.health.check import Context
from forge.health.table import CHECKS
from forge.jobdir.job_files import forge_dir
from forge.process.memory import Limited, available_bytes, limited


def context(folder, threshold=None, **given):
    return Context(CheckConfig(threshold=threshold), folder, folder, **given)


@pytest.fixture
def job(tmp_path):
    forge_dir(tmp_path).mkdir()
    return tmp_path


def test_a_healthy_node_passes(job):
    for look in (storage.disk, storage.inodes, host.shm, host.processes):
        found = look(context(job, 0.0 if look is not host.processes else 1e6))
        assert found is None or not found.is_failed, found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_where_the_policy_sets_no_threshold_nothing_fails(job, check, monkeypatch):
    """`threshold: null` is no threshold of 0: any zombie would exclude a node."""
    monkeypatch.setattr(host, "_states", lambda: {2: "D", 3: "Z"})
    monkeypatch.setattr(host, "_BETWEEN_S", 0.0)
    monkeypatch.setattr(peers, "_ahead_of_files_s", lambda folder: 1.0)
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


def test_a_job_that_has_used_more_memory_than_is_free_is_not_started_here(job):
    """It would be killed for it once more, at the same place."""
    assert host.memory(context(job, 1.0)) is None  # nobody knows
    used_memory.note(job)
    found = host.memory(context(job, 1.0))
    assert found is not None
    assert not found.is_failed
    used_memory.write_json(forge_dir(job) / "memory.json", {"rss": 2**50, "cgroup": 0})
    found = host.memory(context(job, 1.0))
    assert found.is_failed
    assert "has used 1048576.00 before" in found.value
    assert not host.memory(context(job, 1e-9)).is_failed


def test_the_memory_of_a_node_is_that_of_all_its_tasks(job):
    """Eight tasks of 100 GiB need 800; a cgroup counts them all, once."""
    for rank, rss in enumerate((100, 200, 400)):
        suffix = f".{rank}" if rank else ""
        content = {"rss": rss, "cgroup": 250}
        used_memory.write_json(forge_dir(job) / f"memory.json{suffix}", content)
    assert used_memory.read(job, range(2)) == 300
    assert used_memory.read(job, range(1)) == 250
    assert used_memory.read(job, range(5, 6)) == 0


def test_what_the_tasks_of_this_node_have_used_is_compared_with_what_all_limits_leave(
    job, monkeypatch
):
    """What they hold already is theirs; another node's ranks need theirs there."""
    for rank, rss in enumerate((1, 2, 300, 400)):
        content = {"rss": rss, "cgroup": 0}
        used_memory.write_json(forge_dir(job) / f"memory.json{f'.{rank}' if rank else ''}", content)
    monkeypatch.setattr(host.cgroups, "available_bytes", lambda: 900)
    monkeypatch.setattr(host.used_memory, "now", lambda: used_memory.Used(50, 0))
    given = {"ranks": SimpleNamespace(rank=2, size=4), "local_size": 2}
    for free, threshold, is_failed in ((599, 1.0, True), (600, 1.0, False), (9999, 1.5, True)):
        limits = [Limited(2000, 80, 800), Limited(2000, 90, free)]
        monkeypatch.setattr(host.cgroups, "limited", lambda limits=limits: limits)
        assert host.memory(context(job, threshold, **given)).is_failed is is_failed


def test_the_most_that_was_used_is_kept(job, monkeypatch):
    """What a task holds as it ends is no measure of what it needs."""
    for rss, cgroup in ((5, 7), (9, 3), (1, 1)):
        monkeypatch.setattr(used_memory, "now", lambda now=(rss, cgroup): used_memory.Used(*now))
        used_memory.note(job)
    assert used_memory._of(job, None) == (9, 7)


def test_a_full_disk_is_no_fault_of_the_node(tmp_path, monkeypatch):
    """The job ends with 71, and no node is excluded for it."""

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="No space left"):
        storage.disk(context(tmp_path, 0.0))


@pytest.mark.parametrize("content", ["", "[]", '{"rss": "many"}', '{"rss": null}'])
def test_a_note_that_makes_no_sense_is_none(job, content):
    (forge_dir(job) / "memory.json").write_text(content)
    assert used_memory.read(job, [0]) == 0


def test_files_that_a_task_has_mapped_are_not_memory_that_it_uses(tmp_path):
    """Eight tasks that map one data set of 100 GiB would need 800, which no node has."""
    (tmp_path / "data").write_bytes(bytes(64 * 2**20))
    before = used_memory.now().rss
    with open(tmp_path / "data", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert sum(mapped[i] for i in range(0, len(mapped), 4096)) == 0
    assert used_memory.now().rss - before < 32 * 2**20
    mapped.close()


def test_a_file_system_without_a_limit_has_room(tmp_path, monkeypatch):
    """`tmpfs -o size=0`: it says that it has no blocks, and none is free."""
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: nothing)
    assert host.shm(context(tmp_path, 1.0)) is None
    assert storage.room(context(tmp_path, 2.0, state_bytes=100)) is None
    assert storage.inodes(context(tmp_path, 1e4)) is None


def test_zombies_that_nobody_collects_are_counted_by_number(tmp_path):
    """Real ones: the children of a process that does not wait for them."""
    code = (
        "import os, sys, time\n"
        "pids = [os.fork() or os._exit(0) for _ in range(4)]\n"
        "for pid in pids: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)\n"
        "print(*pids, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        pids = {int(pid) for pid in process.stdout.readline().split()}
        states = host._states()
        found = host.processes(context(tmp_path, 0.03))
        process.stdin.close()
    assert {pid for pid in pids if states[pid] == "Z"} == pids
    assert found.is_failed
    assert "zombies (pid" in found.value


def test_a_process_that_waits_for_its_disk_for_a_moment_is_no_fault(tmp_path, monkeypatch):
    """All of them do now and then: who still waits a second later counts."""
    looks = [{1: "D", 2: "D", 3: "S"}, {1: "S", 2: "D", 3: "D"}]
    monkeypatch.setattr(host, "_BETWEEN_S", 0.0)
    monkeypatch.setattr(host, "_states", lambda: looks.pop(0))
    found = host.processes(context(tmp_path, 1.0))
    assert not found.is_failed
    assert found.value.startswith("1 processes wait for a device (state D) (pid 2)")


V2 = {"memory.max": "1000", "memory.current": "700"}
V2_STAT = "anon 300\nshmem 50\ninactive_file 200\n"
V1 = {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "700"}
V1_STAT = "total_rss 300\ntotal_shmem 50\ntotal_inactive_file 200\n"


@pytest.mark.parametrize(
    ("own", "path", "files", "found"),
    [
        ("0::/job/step\n", "job/step", V2 | {"memory.stat": V2_STAT}, [(1000, 350, 500)]),
        ("0::/job/step\n", "job", V2 | {"memory.stat": V2_STAT}, [(1000, 350, 500)]),
        ("0::/\n", ".", V2 | {"memory.stat": V2_STAT}, [(1000, 350, 500)]),
        ("0::/job\n", "job", V2 | {"memory.max": "max", "memory.stat": V2_STAT}, []),
        ("4:memory:/job\n0::/\n", "memory/job", V1 | {"memory.stat": V1_STAT}, [(1000, 350, 500)]),
        ("4:memory:/x\n", "memory", V1 | {"memory.stat": V1_STAT}, [(1000, 350, 500)]),
        (
            "4:memory:/job\n",
            "memory/job",
            V1 | {"memory.limit_in_bytes": "9223372036854771712", "memory.stat": V1_STAT},
            [],
        ),
    ],
)
def test_the_limits_are_those_of_all_cgroups_that_hold_this_process(
    own, path, files, found, tmp_path
):
    """What files have cached is free: the kernel takes it before it kills."""
    folder = tmp_path / "cgroup" / path
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert limited(str(tmp_path / "own"), str(tmp_path / "cgroup")) == found


def test_free_memory_is_what_the_kernel_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:   3 kB\nHugePages_Total: 0\n")
    assert available_bytes(str(tmp_path / "meminfo")) == 3072
    assert available_bytes(str(tmp_path / "nothing")) is None
    assert (available_bytes() is None) == (not Path("/proc/meminfo").exists())
