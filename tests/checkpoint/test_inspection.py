"""Checkpoints read from outside a job: by `forge.load`, by `forge show`, and without forge."""

import itertools
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import readme
import torch
from forked import completed

import forge
from forge.errors import CheckpointError, DamagedCheckpoint
from forge.jobdir import config_file

TENSORS, STATE = "tensors_rank00000.safetensors", "state_rank00000.json"
ROOT = Path(__file__).resolve().parents[3]


def flip(path, where=-8):
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1
    path.write_bytes(raw)


def contents(folder):
    """All files and folders below `folder`, each with its modification time and mode."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_mode) for path in paths}


@pytest.fixture
def trained(store, commit):
    for step in (1, 2, 10):
        commit(store, step)
    return store.directory


@pytest.mark.parametrize(
    ("where", "step"), [(".", 10), ("latest", 10), ("step_2", 2), ("step_10/../step_1", 1)]
)
def test_a_checkpoint_or_the_newest_of_a_directory_is_loaded(where, step, trained, state_of):
    """A user can pass a directory of checkpoints, its `latest` link, or one checkpoint."""
    found = forge.load(trained / where)
    assert found.path == trained.resolve() / f"step_{step}"
    assert found.manifest.step == step
    assert found.state["names"] == state_of(step)["names"]
    assert torch.equal(found.state["weights"], state_of(step)["weights"])


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_loaded_checkpoint_keeps_no_file_open(trained):
    """A script can load the checkpoints of a thousand jobs, on NFS too, where open files stay."""
    found = forge.load(trained)
    descriptors = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    names = [os.path.basename(os.readlink(one)) for one in descriptors if one.is_symlink()]
    assert not {STATE, TENSORS} & {*names}
    assert found.manifest.files.keys() == {STATE, TENSORS}


def test_a_copy_of_another_name_is_loaded(trained, tmp_path):
    """A user has copied the best checkpoint to another place."""
    (trained / "step_2").rename(tmp_path / "best")
    assert forge.load(str(tmp_path / "best")).manifest.step == 2


@pytest.mark.parametrize("name", ["checkpoints", "here", None])
def test_of_a_job_the_checkpoints_are_found(name, open_store, commit, tmp_path):
    """The job's config has `checkpoint.dir`; without a config (plain submitit) forge searches."""
    job = tmp_path / "job"
    (job / ".forge").mkdir(parents=True)
    if name:
        content = {"resilience": {"checkpoint": {"dir": name}}}
        config_file.write(job / ".forge" / "config.yaml", content)
        (job / "other").mkdir()
        (job / "other" / "step_77").mkdir()
    commit(open_store(job / (name or "anything")), 3)
    assert forge.load(job).manifest.step == 3
    assert forge.load(tmp_path).manifest.step == 3, "a sweep of one job"


def test_nothing_is_claimed_or_written(trained, store, commit):
    """A job can be running in the directory: here the fixture's store has its lock."""
    before = contents(trained)
    forge.load(trained)
    assert contents(trained) == before
    commit(store, 11)
    assert forge.load(trained).manifest.step == 11


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_directory_that_one_may_only_read_is_enough(trained):
    """Colleagues look at each other's runs."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        copied = shutil.copytree(trained, Path(folder, "copied"), symlinks=True)
        for path in [*copied.rglob("*"), copied]:
            if not path.is_symlink():
                path.chmod(0o555 if path.is_dir() else 0o444)
        assert load_as(4321, copied) == "10 read only"


def load_as(uid, path):
    """The step that user `uid` loads, and whether the user can write to the directory."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "import forge; forge.load; os.setuid(int(sys.argv[3]))\n"
        "print(forge.load(sys.argv[2]).manifest.step, end=' ')\n"
        "try: open(sys.argv[2] + '/x', 'w')\n"
        "except PermissionError: print('read only')"
    )
    done = completed(["-c", code, str(ROOT), str(path), str(uid)], ROOT, joins_output=False)
    return done.stdout.strip() or done.stderr


def test_a_newest_that_is_damaged_is_passed_over_and_told(trained, caplog):
    """`forge.load` skips a damaged checkpoint as a resume does."""
    flip(trained / "step_10" / TENSORS)
    assert forge.load(trained).manifest.step == 2
    assert re.search(r"Skipped .*step_10: tensors.*CRC-32", caplog.text)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda p: flip(p / TENSORS), rf"step_2: {TENSORS}: expected CRC-32 \w+.*, found"),
        (lambda p: os.truncate(p / STATE, 5), rf"{STATE}: expected \d+ bytes, found 5"),
        (lambda p: (p / TENSORS).unlink(), rf"{TENSORS} is missing: No such file"),
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json, so the save did not finish"),
    ],
)
def test_damage_is_an_error_that_names_the_file(harm, complaint, trained):
    """The error says what was expected and what was found."""
    harm(trained / "step_2")
    with pytest.raises(DamagedCheckpoint, match=complaint) as error:
        forge.load(trained / "step_2")
    assert str(trained) in str(error.value)


def test_what_verifies_less_sees_less(trained, state_of):
    """`size` finds only a file of another size; `none` finds only damage that prevents reading."""
    step = trained / "step_2"
    flip(step / TENSORS)
    for verify in ("size", "none"):
        found = forge.load(step, verify=verify).state["weights"]
        assert not torch.equal(found, state_of(2)["weights"])
    os.truncate(step / TENSORS, 900)
    for verify in ("size", "none"):
        with pytest.raises(DamagedCheckpoint, match=rf"{TENSORS}: expected \d+ bytes, found 900"):
            forge.load(step, verify=verify)


def test_an_unknown_verify_is_refused(trained):
    """A typo must not mean `none`."""
    with pytest.raises(ValueError, match="verify='fulll': expected full, size, none"):
        forge.load(trained, verify="fulll")


def test_of_damaged_checkpoints_alone_each_is_named(trained):
    """The error names all damaged checkpoints, not only the last one."""
    for step in (1, 2, 10):
        flip(trained / f"step_{step}" / STATE, 3)
    with pytest.raises(DamagedCheckpoint) as error:
        forge.load(trained)
    assert all(f"step_{step}: {STATE}" in str(error.value) for step in (1, 2, 10))


def several_jobs(folder):
    for number in "01":
        (folder / number / ".forge").mkdir(parents=True)


NOTHING = {
    "missing": (lambda f: f / "no", "does not exist"),
    "dangling": (lambda f: (os.symlink("gone", f / "l"), f / "l")[1], "is a link to gone"),
    "file": (lambda f: ((f / "x").write_text(""), f / "x")[1], "is a file"),
    "empty": (lambda f: f, "has no checkpoint. Expected a checkpoint"),
    "young job": (lambda f: ((f / ".forge").mkdir(), f)[1], "has not saved a checkpoint yet"),
    "sweep": (lambda f: (several_jobs(f), f)[1], "has several jobs. Name one of them: 0, 1"),
    "several": (
        lambda f: ([(f / n / "step_1").mkdir(parents=True) for n in "ab"], f)[1],
        "has several directories of checkpoints. Name one of them: a, b",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_where_there_is_no_checkpoint_the_error_says_what_there_is(case, tmp_path):
    """The error names the path, and what was expected there."""
    make, complaint = NOTHING[case]
    path = make(tmp_path)
    with pytest.raises(CheckpointError) as error:
        forge.load(path)
    assert f"{path} " in str(error.value)
    assert complaint in str(error.value)


def test_loading_goes_on_while_the_job_removes_what_is_old(trained, open_store, commit, tmp_path):
    """A running job removes old checkpoints; if one vanishes during a load, a newer one loads."""
    busy = open_store(tmp_path / "busy", keep_last=1)
    commit(busy, 0)
    loaded, may_commit, is_done = [0], threading.Semaphore(0), threading.Event()

    def train():
        for step in itertools.count(1):
            may_commit.acquire()
            if is_done.is_set():
                return
            commit(busy, step)
            busy.retain()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while loaded[-1] < 60:
            while may_commit.acquire(blocking=False):
                pass
            may_commit.release(3)  # with the commit in progress fewer than the tries of a load
            loaded.append(forge.load(busy.directory).manifest.step)
    finally:
        is_done.set()
        may_commit.release()
        thread.join()
    assert loaded == sorted(loaded)


# -- without forge ---------------------------------------------------------------------------------


def snippet():
    found, _ = readme.blocks("python", readme.DOCS / "how-to" / "inspect.md")
    return found


def run_snippet(folder):
    """Run the code block of the page in a process in which `import forge` fails."""
    check = (
        "import sys; sys.modules['forge'] = None\n"
        "try: import forge\n"
        "except ImportError: print('no forge')\n"
    )
    done = completed(["-c", check + snippet()], folder, joins_output=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_checkpoint_can_be_read_in_ten_lines_without_forge(trained):
    """Users must be able to read their weights without forge."""
    assert 0 < sum(map(bool, snippet().splitlines())) <= 10
    code, shown, error = run_snippet(trained.parent)
    assert code == 0, error
    assert shown == ["no forge", "10 {'weights': [64]}"]


@pytest.mark.parametrize("name", [TENSORS, STATE])
def test_those_lines_notice_damage(name, trained):
    """The code block checks every file against the manifest."""
    flip(trained / "step_10" / name)
    code, _, error = run_snippet(trained.parent)
    assert code == 1
    assert f"AssertionError: {name}" in error
