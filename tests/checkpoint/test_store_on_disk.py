"""What stays on the disk: retention, and a store that is killed or finds the disk full."""

import errno
import os
import signal
import subprocess
import sys

import pytest
import stores
import torch
import warm
from forked import completed
from stores import STATE, assert_holds, leftovers

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig

# -- retention -------------------------------------------------------------------------------------


def steps(store):
    return sorted(int(p.name[5:]) for p in store.directory.glob("step_*"))


def test_the_last_ones_and_every_so_manieth_are_kept(open_store, commit):
    """`keep_last` for resuming, `keep_every_steps` for looking back."""
    store = open_store(keep_last=2, keep_every_steps=30)
    for step in range(0, 101, 10):
        commit(store, step)
        store.retain()
    assert steps(store) == [0, 30, 60, 90, 100]


def test_one_old_enough_to_roll_back_to_is_kept(open_store, commit):
    """A NaN is noticed after `max_consecutive` steps: the last three may all hold the cause."""
    store = open_store(keep_last=1, keep_back_steps=25)
    for step in range(0, 101, 10):
        commit(store, step)
        store.retain()
        old_enough = [kept for kept in steps(store) if kept <= step - 25]
        assert step < 25 or max(old_enough) >= step - 60
        assert len(steps(store)) <= 4  # those younger than 25 steps, and one older


def test_what_latest_names_is_never_removed(open_store, commit):
    """People and scripts follow that link."""
    store = open_store(keep_last=1)
    for step in (1, 2, 3):
        commit(store, step)
    os.unlink(store.directory / "latest")
    os.symlink("step_2", store.directory / "latest")
    assert store.retain() == ["step_1"]
    assert steps(store) == [2, 3]


def test_a_damaged_one_does_not_use_up_the_places_of_good_ones(open_store, commit):
    """Otherwise the last good one would be removed in favour of two broken ones."""
    store = open_store(keep_last=2)
    for step in (1, 2, 3):
        commit(store, step)
    (store.directory / "step_3" / STATE).unlink()
    store.newest()
    store.retain()
    assert {1, 2} <= set(steps(store))


def test_a_rollback_removes_the_time_line_that_it_ends(store, commit, state_of):
    """Otherwise the next resume would go on from the bad weights."""
    for step in (1, 2, 3):
        commit(store, step)
    store.discard_after(1)
    assert steps(store) == [1]
    assert (store.directory / "latest").resolve().name == "step_1"
    assert_holds(store, 1, state_of)


# -- kills and full disks --------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
sys.path.insert(0, sys.argv[2])
import stores
from stores import state_of
NAMES = ["write", "pwrite", "fsync", "rename", "replace", "symlink", "mkdir", "open"]
NAMES += ["unlink", "rmdir"]
for line in sys.stdin:
    k, step = map(int, line.split())
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    left = [k]
    def deadly(call):
        def wrapped(*args, **kwargs):
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*args, **kwargs)
        return wrapped
    for name in NAMES:
        setattr(os, name, deadly(getattr(os, name)))
    store = Store(Path(sys.argv[1]), CheckpointConfig(keep_last=2))
    for one in (step, step):  # the second replaces the first, as a finish does a stop
        store.commit(store.snapshot(one, state_of(one), copy=False))
        store.retain()
    store.close()  # what is being deleted is another place to be killed at
    os._exit(0)
"""


def test_a_kill_between_any_two_calls_leaves_the_newest_loadable(tmp_path, state_of):
    """Every place where a SIGKILL can fall, one after the other, and then the next attempt."""
    directory = tmp_path / "checkpoints"
    with _closing(directory) as store:
        store.commit(store.snapshot(0, state_of(0), copy=False))
    process = warm.Popen(
        [sys.executable, "-c", KILLED, str(directory), stores.__file__.rpartition("/")[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    step, newest = 0, 0
    for k in range(400):
        step += 1
        process.stdin.write(f"{k} {step}\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        with _closing(directory) as store:
            assert leftovers(directory) == [], k
            found = store.newest()
            assert found.manifest.step in (newest, step), k
            assert torch.equal(found.state["weights"], state_of(found.manifest.step)["weights"])
            assert store.passed_over == [], k
            newest = found.manifest.step
            store.retain()  # otherwise each kill would leave one more to be looked at
        if code == 0:
            break
        assert code == -signal.SIGKILL
    process.stdin.close()
    process.wait(60)
    process.stdout.close()
    assert code == 0
    assert k > 60
    assert newest == step


class _closing:
    def __init__(self, directory):
        self.directory = directory

    def __enter__(self):
        self.store = Store(self.directory, CheckpointConfig(keep_last=2))
        return self.store

    def __exit__(self, *_):
        self.store.close()


def test_a_copy_can_be_committed_again_if_only_the_link_failed(open_store, state_of, monkeypatch):
    """A stop tries its save three times, from the same copy."""
    store = open_store()
    snapshot = store.snapshot(1, state_of(1), copy=True)
    symlink = os.symlink

    def failing(*_):
        monkeypatch.setattr(os, "symlink", symlink)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "symlink", failing)
    with pytest.raises(OSError, match="No space left"):
        store.commit(snapshot)
    assert store.commit(snapshot) == store.directory / "step_1"
    assert os.readlink(store.directory / "latest") == "step_1"
    assert_holds(store, 1, state_of)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("has_same_step", [False, True], ids=["new", "replacing"])
def test_a_failure_of_any_call_changes_nothing_and_the_next_save_works(
    error, has_same_step, open_store, commit, state_of, monkeypatch
):
    """Each system call of a commit fails once; what was there before is there afterwards."""
    store = open_store(keep_last=100)
    commit(store, 1)
    names = ["write", "pwrite", "fsync", "rename", "replace", "symlink", "mkdir"]
    real = {name: getattr(os, name) for name in names}
    failures = 0
    for k in range(200):
        left = [k]

        def failing(call, left=left):
            def wrapped(*args, **kwargs):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(error, os.strerror(error))
                return call(*args, **kwargs)

            return wrapped

        if has_same_step:
            commit(store, 2)
        store.wait()  # what is deleted beside must not take the failure
        for name in names:
            monkeypatch.setattr(os, name, failing(real[name]))
        try:
            commit(store, 2)
            has_failed = False
        except OSError as raised:
            assert raised.errno == error  # noqa: PT017 - success ends the loop
            has_failed = True
        for name in names:
            monkeypatch.setattr(os, name, real[name])
        if left[0] >= 0:
            break
        failures += has_failed
        store.wait()
        store.retain()  # tries again what could not be deleted
        store.wait()
        assert leftovers(store.directory) == [], k
        found = store.newest()
        assert store.passed_over == [], k
        assert found.manifest.step in ((2,) if has_same_step else (1, 2)), k
        commit(store, 3)
        assert_holds(store, 3, state_of)
        store.discard_after(1)
    assert failures >= 12


def test_a_disk_that_fills_up_keeps_what_is_there(tmp_path):
    """On a file system of 1 MiB, not a pretended one."""
    probe = f"unshare -m mount -t tmpfs tmpfs {tmp_path}"
    if subprocess.run(probe, shell=True, capture_output=True).returncode:
        pytest.skip("needs the right to mount in a private namespace (root)")
    done = completed(["-c", FULL_DISK, str(tmp_path)], tmp_path.parent, joins_output=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["filled", "kept", "again"]


FULL_DISK = """
import ctypes, errno, os, sys
libc, private = ctypes.CDLL(None), 1 << 18 | 1 << 14
assert not libc.unshare(0x20000)  # the mounts of this process are its own
assert not libc.mount(b"none", b"/", None, private, None)
assert not libc.mount(b"tmpfs", os.fsencode(sys.argv[1]), b"tmpfs", 0, b"size=1m")
from pathlib import Path
import torch
from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.jobdir.ledger import read
from forge.jobdir.ledger_writer import Ledger
directory = Path(sys.argv[1], "checkpoints")
store = Store(directory, CheckpointConfig(keep_last=9))
ledger = Ledger(directory)
def commit(step):
    state = {"w": torch.full((40_000,), float(step))}
    store.commit(store.snapshot(step, state, copy=False))
commit(1)
Path(sys.argv[1], "reserve").write_bytes(bytes(200_000))
try:
    for step in range(2, 20):
        commit(step)
except OSError as error:
    assert error.errno == errno.ENOSPC
    print("filled")
last = step - 1
with open(Path(sys.argv[1], "ballast"), "wb", buffering=0) as ballast:
    try:
        while True:
            ballast.write(b"x" * 4096)
    except OSError:
        pass
names = sorted(os.listdir(directory))
assert not [n for n in names if "tmp" in n], names
assert store.newest().state["w"][0] == last
lines = 0
for i in range(300):
    ledger.write("metrics", step=i, values={"loss": float(i), "text": "x" * 100})
    ledger.progress(i)
try:
    ledger.sync()
    sys.exit("the disk was not full")
except OSError:
    print("kept")
os.unlink(Path(sys.argv[1], "reserve"))
ledger.sync()
assert sorted(read(directory).metrics) == list(range(300))
store.discard_after(last - 2)
store.wait()  # they are deleted beside; only then is there room
commit(last)
assert store.newest().state["w"][0] == last
print("again")
"""
