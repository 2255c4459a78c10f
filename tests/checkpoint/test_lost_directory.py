"""During a run the checkpoint directory vanishes, turns read-only, or is replaced."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import warm
from stores import assert_holds
from test_fence import ask, hold  # noqa: F401

import forge
from forge.errors import CheckpointError
from forge.jobdir import ledger
from forge.shutdown import stopping


def directory_of(store):
    return store.directory, store.directory.with_name("away")


# -- one store -------------------------------------------------------------------------------------


def test_a_directory_that_comes_back_is_still_ours(store, commit, state_of):
    """A network file system can be unavailable for a minute."""
    directory, away = directory_of(store)
    commit(store, 1)
    directory.rename(away)
    with pytest.raises(FileNotFoundError):
        commit(store, 2)
    with pytest.raises(FileNotFoundError):
        store.retain()
    away.rename(directory)
    commit(store, 3)
    assert_holds(store, 3, state_of)


def test_a_directory_that_was_emptied_or_made_again_is_not_written_to(store, commit):
    """It can be the bare mount point of an unmounted file system: files in it would vanish."""
    directory, away = directory_of(store)
    commit(store, 1)
    directory.rename(away)
    directory.mkdir()
    for call in (lambda: commit(store, 2), store.retain):
        with pytest.raises(FileNotFoundError, match="removed or emptied under a running job"):
            call()
    assert os.listdir(directory) == []


def test_a_copy_put_back_is_locked_anew(store, commit, state_of):
    """The lock was on the original file: without a new lock a second job could start."""
    directory, away = directory_of(store)
    commit(store, 1)
    directory.rename(away)
    shutil.copytree(away, directory, symlinks=True)
    assert not is_locked(directory)
    commit(store, 2)
    assert is_locked(directory)
    assert_holds(store, 2, state_of)


def is_locked(directory):
    script = f"import fcntl; fcntl.lockf(open({str(directory / '.lock')!r}, 'r+'), 6)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True).returncode != 0


def test_a_lock_file_that_was_removed_is_made_anew(store, commit):
    """People delete lock files that look like leftovers."""
    (store.directory / ".lock").unlink()
    commit(store, 1)
    assert is_locked(store.directory)


def test_a_copy_that_another_job_has_taken_is_not_written_to(hold, tmp_path, commit):  # noqa: F811
    """While the directory was away, a user put a copy in its place and started a job in it."""
    ours = hold()
    directory = tmp_path / "checkpoints"
    directory.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", directory)
    assert ask(ours) == "may commit"
    directory.rename(tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", directory)
    theirs = hold()
    assert ask(theirs) == "may commit"
    assert ask(ours) == "DirectoryInUse"


def test_a_directory_that_cannot_be_read_is_no_fresh_start(store, commit, monkeypatch):
    """Only an empty directory is a fresh start."""
    commit(store, 1)

    def failing(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("forge.checkpoint.store.step_dirs", failing)
    with pytest.raises(CheckpointError, match=r"cannot be read: \[Errno 116\] Stale"):
        store.newest()
    with pytest.raises(CheckpointError, match=r"rollback to step 0.*after step 0 away"):
        store.discard_after(0)


# -- a whole run -----------------------------------------------------------------------------------


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A run of 20 steps with a save each 2; `at[step]()` is called in it."""
    monkeypatch.setattr("forge.shutdown.stopping.leave", forge.Exit)
    directory = tmp_path / "job"
    model = torch.nn.Linear(2, 1)
    policy = {"checkpoint": {"dir": str(directory), "every_steps": 2, "keep_last": 2}}
    trained = []

    def run(at):
        with forge.Run(policy, model=model) as run:
            for step in run.steps(20):
                at.get(step, lambda: None)()
                trained.append(step)

    yield run, directory, trained
    stopping.uninstall()


def test_a_run_outlives_its_directory_for_some_saves(train, caplog):
    """Training continues, and the next successful save has all changes of the failed ones."""
    run, directory, trained = train
    away = directory.with_name("away")
    run({3: lambda: directory.rename(away), 9: lambda: away.rename(directory)})
    assert trained == list(range(20))
    assert [text.partition(":")[0] for text in caplog.messages if "failed (" in text] == [
        f"The save at step {step} failed ({number} of 5 in a row)"
        for number, step in enumerate([4, 6, 8], 1)
    ]
    assert "removed or emptied" in caplog.text
    assert sorted(path.name for path in directory.glob("step_*")) == ["step_18", "step_20"]
    events = ledger.read(directory).attempts[0].events
    assert [e["step"] for e in events if e["kind"] == "save_failed"] == [4, 6, 8]


def test_a_run_whose_directory_stays_away_ends_with_74(train):
    """The run would only train steps that it cannot save."""
    run, directory, trained = train
    with pytest.raises(forge.Exit) as exit_:
        run({3: lambda: directory.rename(directory.with_name("away"))})
    assert exit_.value.code == 74
    assert trained[-1] == 11  # saves at 4, 6, 8, 10 and 12 failed


def test_a_run_whose_directory_another_job_took_ends_with_73(train):
    """The other job owns the directory, so a retry cannot help."""
    run, directory, trained = train

    def take():
        directory.rename(directory.with_name("away"))
        directory.mkdir()
        (directory / ".lock").touch()
        token = json.loads((directory.with_name("away") / ".fence.json").read_text())
        (directory / ".fence.json").write_text(json.dumps({**token, "token": "another"}))

    with pytest.raises(forge.Exit) as exit_:
        run({3: take})
    assert exit_.value.code == 73
    assert trained[-1] == 3
    assert not list(directory.glob("step_*"))


def test_a_halt_with_the_directory_away_still_says_why(train, monkeypatch):
    """The next start depends on the halt's exit code; a missing directory must not change it."""
    _, directory, _ = train
    policy = {"checkpoint": {"dir": str(directory)}, "nan": {"action": "halt"}}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run():
        with forge.Run(policy, model=model, optimizer=optimizer) as run:
            for step in run.steps(20):
                if step == 3:
                    directory.rename(directory.with_name("away"))
                run.update(torch.tensor(float("nan") if step == 3 else 0.0), optimizer)

    with pytest.raises(forge.Exit, match=r"halted by the NaN policy.*job cannot be read") as exit_:
        run()
    assert exit_.value.code == 65


MOUNTED = """
import subprocess, sys
from pathlib import Path
import torch
import forge

torch.set_num_threads(1)
torch.manual_seed(1)
place, disk = sys.argv[1:3]
def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)
mount("--bind", disk, place)
at = {
    3: lambda: (mount("--bind", place, place), mount("-o", "remount,bind,ro", place)),
    7: lambda: subprocess.run(["umount", place], check=True),
    11: lambda: subprocess.run(["umount", "-l", place], check=True),
    15: lambda: mount("--bind", disk, place),
}
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
policy = {"checkpoint": {"dir": place, "every_steps": 2, "keep_last": 2}}
with forge.Run(policy, model=model, optimizer=optimizer) as run:
    for step in run.steps(20):
        at.get(step, int)()
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        run.update(loss, optimizer)
        print(step, flush=True)
print(*sorted(path.name for path in Path(disk).glob("step_*")))
"""


def test_a_file_system_that_turns_read_only_and_then_goes_away_and_comes_back(tmp_path, disk):
    """Real mounts: the kernel raises the errors, in the system calls that really fail."""
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-c", MOUNTED, str(place), str(disk)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = warm.run(command, timeout=200, disk=(disk, "8m"), **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:20] == [str(step) for step in range(20)]
    assert done.stdout.split("\n")[20] == "step_18 step_20"
    for step, number, error in [
        (4, 1, "Read-only file system"),
        (6, 2, "Read-only file system"),
        (12, 1, "removed or emptied"),
        (14, 2, "removed or emptied"),
    ]:
        (line,) = [x for x in done.stderr.splitlines() if f"save at step {step} failed" in x]
        assert f"({number} of 5 in a row)" in line
        assert error in line
    assert list(place.iterdir()) == []  # nothing was written to the bare mount point
