"""Checkpoints that verify or do not exist, whatever happens to their files and to the disk."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from forge.checkpoint import Store, manifest
from forge.config import CheckpointConfig, Verify
from forge.errors import CheckpointError, DamagedCheckpoint

STATE, TENSORS = "state_rank00000.json", "tensors_rank00000.safetensors"
FILES = [manifest.NAME, STATE, TENSORS]


def leftovers(directory):
    return [
        p.name
        for p in directory.iterdir()
        if p.name.startswith(".") and "." in p.name[1:] and p.name != ".fence.json"
    ]


def assert_holds(store, step, state_of):
    found = store.newest()
    assert found.manifest.step == step
    assert found.state["step"] == step
    assert torch.equal(found.state["weights"], state_of(step)["weights"])


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def rewrite_manifest(path, **changes):
    """As an attacker, or a bug, would: with a checksum that matches."""
    content = json.loads((path / manifest.NAME).read_bytes())
    del content["checksum"]
    content.update(changes)
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (path / manifest.NAME).write_text(json.dumps({**content, "checksum": checksum}))


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
    """What a power cut or a full disk leaves."""
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


@pytest.mark.parametrize("verify", ["full", "size", "none"])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_what_is_no_plain_file_is_damage_and_blocks_nobody(kind, name, verify, open_store, commit):
    """Opening a FIFO waits for ever; a directory raises something else than a file does."""
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
    """Of the same size and valid in itself, but not what was committed here."""
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
    assert all("its manifest is that of step 1" in reason for reason in store.passed_over)


GOOD = {"size": 1, "crc32": 1}


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
        {"files": {STATE: {"size": -1, "crc32": 1}, TENSORS: GOOD}},
        {"files": {STATE: {"size": "9", "crc32": 1}, TENSORS: GOOD}},
        {"files": {STATE: {"size": 1e300, "crc32": 1}, TENSORS: GOOD}},
        {"step": "1"},
        {"step": 2},
        {"step": None},
        {"format": 2},
        {"format": None},
        {"no_such_field": 1},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_no_manifest_says_is_damage(changes, store, commit):
    """Its own checksum may match all the same; nothing outside the directory is opened."""
    path = commit(store, 1)
    rewrite_manifest(path, **changes)
    with pytest.raises(DamagedCheckpoint):
        store.read(path)
    assert not store.holds(1, is_complete=False) or changes.get("files") in ({}, {STATE: GOOD})


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100000, b"{}"]
)
def test_a_manifest_that_is_something_else_is_damage(content, store, commit):
    """Any bytes may stand there."""
    path = commit(store, 1)
    (path / manifest.NAME).write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        store.read(path)


def test_bytes_that_are_no_tensor_file_are_damage_even_unverified(open_store, commit, state_of):
    """With `verify=size` the parser is all that stands between damage and a crash."""
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
    misnamed = "a value tagged '!tensor' cannot be read: KeyError('weights')"
    assert {text for text in told if not text.startswith(f"{TENSORS}: is not in")} == {misnamed}
    assert 280 < len(told) < 300


def test_a_disk_that_cannot_be_read_is_damage_and_the_older_one_is_taken(
    store, commit, monkeypatch, state_of
):
    """A bad sector must cost an interval, not the run."""
    commit(store, 1)
    commit(store, 2)
    readv = os.readv
    calls = []

    def fail_first(fd, buffers):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", fail_first)
    assert_holds(store, 1, state_of)
    assert "Input/output error" in store.passed_over[0]


# -- which one is taken ----------------------------------------------------------------------------


def test_the_newest_that_verifies_is_taken_and_the_others_are_explained(store, commit, state_of):
    """Nobody can repair what is passed over in silence."""
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
    """Otherwise it would be passed over at every start for ever."""
    commit(store, 1)
    flip(commit(store, 2) / TENSORS, random.Random(1))
    assert_holds(store, 1, state_of)
    assert not store.holds(2, is_complete=False)
    commit(store, 2)
    assert store.holds(2, is_complete=False)
    assert_holds(store, 2, state_of)


def test_a_complete_checkpoint_counts_for_an_incomplete_one_but_not_the_reverse(store, commit):
    """A stop in the last step saves; the finish after it has to be recorded all the same."""
    commit(store, 1)
    assert store.holds(1, is_complete=False)
    assert not store.holds(1, is_complete=True)
    commit(store, 1, is_complete=True)
    assert store.holds(1, is_complete=False)
    assert store.holds(1, is_complete=True)
    assert store.newest().manifest.is_complete


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
from forge.checkpoint import Store
from forge.config import CheckpointConfig
sys.path.insert(0, sys.argv[2])
from conftest import state_of
NAMES = ["write", "fsync", "rename", "replace", "symlink", "mkdir", "open", "unlink", "rmdir"]
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
        store.commit(store.snapshot(one, state_of(one), one == step, copy=False))
        store.retain()
    os._exit(0)
"""


def test_a_kill_between_any_two_calls_leaves_the_newest_loadable(tmp_path, state_of):
    """Every place where a SIGKILL can fall, one after the other, and then the next attempt."""
    directory = tmp_path / "checkpoints"
    with _closing(directory) as store:
        store.commit(store.snapshot(0, state_of(0), False, copy=False))
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory), str(Path(__file__).parent)],
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
        if code == 0:
            break
        assert code == -signal.SIGKILL
    process.stdin.close()
    process.wait(60)
    process.stdout.close()
    assert code == 0
    assert k > 30
    assert newest == step


class _closing:
    def __init__(self, directory):
        self.directory = directory

    def __enter__(self):
        self.store = Store(self.directory, CheckpointConfig(keep_last=2))
        return self.store

    def __exit__(self, *_):
        self.store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("has_same_step", [False, True], ids=["new", "replacing"])
def test_a_failure_of_any_call_changes_nothing_and_the_next_save_works(
    error, has_same_step, open_store, commit, state_of, monkeypatch
):
    """Each system call of a commit fails once; what was there before is there afterwards."""
    store = open_store(keep_last=100)
    commit(store, 1)
    names = ["write", "fsync", "rename", "replace", "symlink", "mkdir"]
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
        for name in names:
            monkeypatch.setattr(os, name, failing(real[name]))
        try:
            commit(store, 2, is_complete=True)
            has_failed = False
        except OSError as raised:
            assert raised.errno == error  # noqa: PT017 - success ends the loop
            has_failed = True
        for name in names:
            monkeypatch.setattr(os, name, real[name])
        if not has_failed:
            break
        failures += 1
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
    script = f"""
set -e
mount -t tmpfs -o size=1m tmpfs {tmp_path}
exec {sys.executable} - {tmp_path} <<'END'
{FULL_DISK}
END
"""
    probe = f"unshare -m mount -t tmpfs tmpfs {tmp_path}"
    if subprocess.run(probe, shell=True, capture_output=True).returncode:
        pytest.skip("needs the right to mount in a private namespace (root)")
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["filled", "kept", "again"]


FULL_DISK = """
import errno, os, sys
from pathlib import Path
import torch
from forge.checkpoint import Store
from forge.config import CheckpointConfig
from forge.ledger import Ledger, read
directory = Path(sys.argv[1], "checkpoints")
store = Store(directory, CheckpointConfig(keep_last=9))
ledger = Ledger(directory)
def commit(step):
    store.commit(store.snapshot(step, {"w": torch.full((40_000,), float(step))}, False, False))
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
commit(last)
assert store.newest().state["w"][0] == last
print("again")
"""
