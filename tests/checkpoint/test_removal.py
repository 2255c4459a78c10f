"""Removing: never what somebody reads, never in the way of training, and again after a failure."""

import errno
import fcntl
import os
import subprocess
import sys
import threading

import pytest
import stores
from forked import completed
from started import Popen
from stores import TENSORS, assert_holds

from forge.checkpoint import removal, retention
from forge.checkpoint.retention import reading_lock, removing_lock
from forge.errors import DamagedCheckpoint

READER = """
import os, sys
from pathlib import Path
from forge.checkpoint.retention import reading_lock
with reading_lock(Path(sys.argv[1])):
    if "fork" in sys.argv:  # as DataLoader workers are, which may outlive what their parent reads
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    print("reads", flush=True)
    sys.stdin.readline()
print("has read", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def read_elsewhere():
    """Another process that reads a checkpoint until its input ends."""

    def start(path, *more):
        command = [sys.executable, "-c", READER, str(path), *more]
        reader = Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert reader.stdout.readline() == "reads\n"
        return reader

    return start


def let_go(reader):
    reader.stdin.write("\n")
    assert reader.stdout.readline() == "has read\n"


def names(store):
    return sorted(path.name for path in store.directory.glob("step_*"))


def hidden(store):
    """What has been taken away and is not deleted yet, in whosever work directory."""
    found = [*store.directory.glob(".work_*/*_step_*"), *store.directory.glob(".left_*/*_step_*")]
    return sorted(path.name for path in found)


# -- in use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["fork"]], ids=["alone", "with a forked child"])
def test_one_that_another_process_reads_is_left_until_it_has_read(
    more, open_store, commit, read_elsewhere
):
    """An evaluation job takes its time, and would find half of the files."""
    store = open_store(keep_last=1)
    path = commit(store, 1)
    reader = read_elsewhere(path, *more)
    commit(store, 2)
    assert store.retain() == []
    let_go(reader)
    assert store.retain() == ["step_1"]


def test_a_reader_that_is_killed_holds_nothing(open_store, commit, read_elsewhere):
    """The kernel lets go for it; a file as a lock would stay."""
    store = open_store(keep_last=1)
    reader = read_elsewhere(commit(store, 1))
    commit(store, 2)
    assert store.retain() == []
    reader.kill()
    reader.wait()
    assert store.retain() == ["step_1"]


def test_reading_inside_reading_does_not_let_go_of_it(open_store, commit):
    """Locks of `lockf` would end with the first file that is closed: the manifest's own."""
    store = open_store(keep_last=1)
    path = commit(store, 1)
    commit(store, 2)
    with reading_lock(path):
        store.read(path)
        assert store.retain() == []
    assert store.retain() == ["step_1"]


def test_what_a_rollback_discards_under_a_reader_is_deleted_when_it_has_read(
    store, commit, open_store, read_elsewhere
):
    """It may not be found again, but whoever has it open reads on."""
    commit(store, 1)
    reader = read_elsewhere(commit(store, 2))
    store.discard_after(1)
    store.wait()
    assert names(store) == ["step_1"]
    (left,) = hidden(store)
    assert left == "discarded_step_2-000001"
    (kept,) = store.directory.glob(f".work_*/{left}/{TENSORS}")
    store.close()
    again = open_store()  # nor does the next attempt
    assert hidden(again) == [left]
    assert not kept.exists()  # but taken over
    assert list(store.directory.glob(f".left_*/{left}/{TENSORS}"))
    let_go(reader)
    again.retain()
    again.wait()
    assert hidden(again) == []
    assert list(store.directory.glob(".left_*")) == []


def test_what_was_replaced_under_a_reader_does_not_come_back_after_a_rollback(
    store, commit, open_store, read_elsewhere
):
    """Its place is empty then, as after a kill between the two renames of a replacement."""
    commit(store, 1)
    reader = read_elsewhere(commit(store, 2))
    commit(store, 2)
    store.wait()
    assert hidden(store) == ["discarded_step_2-000001"]
    store.discard_after(1)
    store.close()
    again = open_store()
    assert names(again) == ["step_1"]
    let_go(reader)


def test_a_reader_waits_for_whoever_is_about_to_remove_and_reads_what_is_there_then(store, commit):
    """Between the look and the rename of the other side."""
    path = commit(store, 1)
    has_begun, found = threading.Event(), []

    def read():
        has_begun.set()
        with reading_lock(path):
            found.append(path.exists())

    with removing_lock(path) as is_free:
        assert is_free
        thread = threading.Thread(target=read)
        thread.start()
        has_begun.wait()
        path.rename(path.with_name(".removed_step_1-1-1"))
    thread.join()
    assert found == [False]
    with pytest.raises(DamagedCheckpoint, match="no manifest"):
        store.read(path)


def test_a_reader_gives_up_waiting_for_a_remover_that_hangs(store, commit, monkeypatch):
    """A stopped process must not hang all others."""
    monkeypatch.setattr(retention, "PATIENCE_S", 0.05)
    path = commit(store, 1)
    with removing_lock(path):
        assert store.read(path).manifest.step == 1


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_everything_goes_on_and_is_told_once(
    error, open_store, commit, monkeypatch, caplog
):
    """Some network file systems have none."""

    def none(fd, operation):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", none)
    store = open_store(keep_last=1)
    for step in (1, 2, 3):
        store.read(commit(store, step))
        store.retain()
    assert names(store) == ["step_3"]
    assert len([text for text in caplog.messages if "does not support file locks" in text]) == 1


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir, lambda path: None], ids=["FIFO", "dir", ""])
def test_what_has_no_manifest_to_lock_holds_nobody_up(kind, store, commit):
    """Reading says what is wrong with it."""
    path = commit(store, 1)
    (path / "manifest.json").unlink()
    kind(path / "manifest.json")
    before = len(os.listdir("/proc/self/fd"))
    with reading_lock(path), removing_lock(path) as is_free:
        assert is_free
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(DamagedCheckpoint):
        store.read(path)


# -- beside training -------------------------------------------------------------------------------


@pytest.fixture
def slow_disk(monkeypatch):
    """Deleting waits until it is let."""
    may_delete = threading.Event()
    unlink = os.unlink

    def late(path, *args, **kwargs):
        if threading.current_thread().name == "forge-remove":
            assert may_delete.wait(60)
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", late)
    yield may_delete
    may_delete.set()


def test_neither_a_save_nor_the_next_waits_for_what_is_deleted(
    open_store, commit, slow_disk, state_of
):
    """Unlinking ten gigabytes takes seconds."""
    store = open_store(keep_last=1)
    for step in range(1, 5):
        commit(store, step)
        store.retain()
        assert names(store) == [f"step_{step}"]
    assert_holds(store, 4, state_of)
    assert len(hidden(store)) == 3
    slow_disk.set()
    store.wait()
    assert hidden(store) == []


def test_a_stop_waits_for_it_only_so_long_and_the_next_attempt_removes_the_rest(
    open_store, commit, slow_disk, monkeypatch
):
    """The grace time of a preemption is there for the save."""
    monkeypatch.setattr(removal, "CLOSE_WAIT_S", 0.1)
    store = open_store(keep_last=1)
    for step in (1, 2, 3):
        commit(store, step)
    store.retain()
    store.close()
    thread = store._workspace.remover._thread
    assert thread.is_alive()
    assert len(hidden(store)) == 2
    slow_disk.set()
    thread.join()
    assert len(hidden(store)) == 1  # it ended with the one it was at
    store = open_store()
    assert hidden(store) == []
    assert names(store) == ["step_3"]


def test_an_interpreter_that_ends_while_it_deletes_is_not_held_up(tmp_path, open_store):
    """A thread that is waited for at the end would be one more way to hang."""
    script = """
import os, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import stores
from stores import commit
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
store = Store(Path(sys.argv[1]), CheckpointConfig(keep_last=1))
for step in (1, 2):
    commit(store, step)
begun = threading.Event()
os.unlink = lambda path: (begun.set(), threading.Event().wait())
store.retain()
begun.wait()
"""
    command = ["-c", script, str(tmp_path / "checkpoints"), os.path.dirname(stores.__file__)]
    assert completed(command, tmp_path).returncode == 0
    store = open_store()
    assert names(store) == ["step_2"]
    assert hidden(store) == []


@pytest.mark.parametrize("call", ["unlink", "rmdir", "fsync"])
@pytest.mark.parametrize("error", [errno.EBUSY, errno.EIO, errno.EROFS, errno.ENOTEMPTY])
def test_what_cannot_be_deleted_is_told_once_and_tried_again(
    call, error, open_store, commit, monkeypatch, caplog
):
    """NFS keeps a file that is open as `.nfs…`, for a while; a disk may come back, too."""
    store = open_store(keep_last=1)
    commit(store, 1)
    real = getattr(os, call)

    def failing(*args, **kwargs):
        if threading.current_thread().name == "forge-remove":
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    for step in (2, 3, 4):
        commit(store, step)
        assert store.retain() == [f"step_{step - 1}"]
        store.wait()
    assert len(hidden(store)) == 3
    assert len([text for text in caplog.messages if "could not be removed" in text]) == 1
    monkeypatch.setattr(os, call, real)
    store.retain()
    store.wait()
    assert hidden(store) == []


def test_one_that_cannot_be_renamed_stops_none_of_the_others(
    open_store, commit, monkeypatch, caplog
):
    """Of another owner, in a directory with the sticky bit."""
    store = open_store(keep_last=1)
    for step in range(1, 5):
        commit(store, step)
    rename = os.rename

    def failing(source, target):
        if os.path.basename(source) == "step_2":
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    assert store.retain() == ["step_3", "step_1"]
    assert store.retain() == []
    assert len(caplog.messages) == 1
    monkeypatch.setattr(os, "rename", rename)
    assert store.retain() == ["step_2"]


def test_without_a_thread_the_next_pass_deletes(open_store, commit, monkeypatch):
    """A process that may start no more threads still trains."""
    store = open_store(keep_last=1)
    for step in (1, 2):
        commit(store, step)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert store.retain() == ["step_1"]
        assert len(hidden(store)) == 1
    store.retain()
    store.wait()
    assert hidden(store) == []
