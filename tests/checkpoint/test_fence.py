"""One live job a directory, and of one job only its newest attempt may commit."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from forked import ForkedJob
from started import Popen

from forge.checkpoint import workspace
from forge.checkpoint.fence import LOCK_FILE, TOKEN_FILE
from forge.errors import CheckpointError, DirectoryInUse, DiskFull

HOLDER = """
import sys
from pathlib import Path
from forge.checkpoint.fence import Fence
fence = Fence(Path(sys.argv[1]))
print("held", flush=True)
for _ in sys.stdin:
    try:
        fence.check()
        print("may commit", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture
def hold(tmp_path):
    """Another process that holds the directory; answers to `ask` whether it may commit."""

    def start(**env):
        directory = tmp_path / "checkpoints"
        directory.mkdir(exist_ok=True)
        process = Popen(
            [sys.executable, "-c", HOLDER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
        assert process.stdout.readline() == "held\n"
        return process

    return start


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_second_store_in_the_same_process_is_refused(open_store):
    """POSIX locks do not see it; two Runs in one script must not mix their checkpoints."""
    first = open_store()
    with pytest.raises(DirectoryInUse, match=f"pid {os.getpid()}"):
        open_store()
    first.close()
    open_store()


def test_the_same_directory_by_another_name_is_the_same_directory(tmp_path, open_store):
    """`latest_run` links are common."""
    open_store()
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    with pytest.raises(DirectoryInUse):
        open_store(tmp_path / "link")


def test_a_live_process_keeps_others_out_and_is_named(hold, open_store):
    """The person who started the second one has to find the first."""
    process = hold()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DirectoryInUse, match=rf"pid {process.pid} on .*hydra\.run\.dir"):
        open_store()
    assert len(os.listdir("/proc/self/fd")) == before
    assert ask(process) == "may commit"


def test_a_killed_process_blocks_nobody(hold, open_store, commit):
    """A lock file left by SIGKILL must not need a person."""
    process = hold()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (open_store().directory / LOCK_FILE).exists()


LEAVING = (
    HOLDER
    + """
import os, subprocess, time
if sys.argv[2] == "forked by Python":
    child = os.fork() or time.sleep(1000)
else:  # C code runs no hook of Python's: its child has all descriptors
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[*fence._locks._fds.values()]).pid
print(child, flush=True)
time.sleep(1000)
"""
)


@pytest.fixture
def leave_behind(tmp_path):
    """Kill a process that holds the directory, but not its child."""
    children = []

    def leave(kind):
        directory = tmp_path / "checkpoints"
        directory.mkdir()
        command = [sys.executable, "-c", LEAVING, str(directory), kind]
        with Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"held\n"
            children.append(int(process.stdout.readline()))
            process.kill()

    yield leave
    for child in children:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["forked by Python", "forked by C"])
def test_a_child_that_outlives_its_killed_parent_blocks_nobody(
    kind, leave_behind, open_store, commit
):
    """A worker that hangs in a read; a child that had no time to let go, or never does."""
    leave_behind(kind)
    store = open_store()
    commit(store, 1)
    assert store.newest().manifest.step == 1


def test_what_was_left_behind_on_another_host_cannot_be_told_from_its_parent(
    leave_behind, tmp_path, open_store
):
    """Only there could one see who lives."""
    leave_behind("forked by C")
    file = tmp_path / "checkpoints" / TOKEN_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "another"}))
    with pytest.raises(DirectoryInUse, match="on another"):
        open_store()


def test_who_copies_its_own_checkpoints_keeps_others_out(store, commit, tmp_path):
    """An uploader does, or whoever hashes them: POSIX locks end with any descriptor of the file."""
    commit(store, 1)
    shutil.copytree(store.directory, tmp_path / "copy", symlinks=True)
    assert not has_posix_lock(store.directory)
    second = [sys.executable, "-c", HOLDER, store.directory]
    done = subprocess.run(second, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert f"is in use by a running job: pid {os.getpid()}" in done.stderr
    commit(store, 2)
    assert has_posix_lock(store.directory)


def has_posix_lock(directory):
    script = f"import fcntl; fcntl.lockf(open({str(directory / LOCK_FILE)!r}, 'r+'), 6)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True).returncode != 0


def test_a_requeued_job_takes_over_from_its_zombie(hold, open_store, commit, monkeypatch):
    """A node that was cut off may still run the old attempt, and hold the lock."""
    zombie = hold(SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    store = open_store()
    commit(store, 1)
    assert ask(zombie) == "DirectoryInUse"


@pytest.mark.parametrize(("job", "restarts"), [("77", "1"), ("77", "0"), ("78", "2"), ("", "9")])
def test_any_other_job_does_not_take_over(job, restarts, hold, open_store, monkeypatch):
    """Only a later restart of the very same job knows that the holder is a zombie."""
    hold(SLURM_JOB_ID="77", SLURM_RESTART_COUNT="1")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with pytest.raises(DirectoryInUse):
        open_store()


def test_who_was_superseded_commits_nothing(store, commit):
    """Also where the file system gave its lock away."""
    commit(store, 1)
    token = json.loads((store.directory / TOKEN_FILE).read_text())
    (store.directory / TOKEN_FILE).write_text(json.dumps(token | {"token": "newer", "pid": 1}))
    with pytest.raises(DirectoryInUse, match=r"newer attempt of this job \(pid 1 "):
        commit(store, 2)
    assert store.newest().manifest.step == 1
    assert not list(store.directory.glob(".step_*"))


def test_being_superseded_while_writing_prevents_the_commit(store, commit, monkeypatch):
    """Writing takes minutes; the check before it is not enough."""
    describe = store._describe

    def describe_and_lose(*arguments):
        describe(*arguments)
        (store.directory / TOKEN_FILE).write_text("{}")

    monkeypatch.setattr(store, "_describe", describe_and_lose)
    with pytest.raises(DirectoryInUse):
        commit(store, 1)
    assert not [p for p in store.directory.iterdir() if "step_" in p.name]


@pytest.mark.parametrize("content", ["", "[]", '{"restart_count": "x"}', "\0", '{"claimed": {}}'])
def test_a_broken_token_stops_nobody(content, tmp_path, open_store, commit):
    """The lock decides; the token of an earlier attempt is only a record."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / TOKEN_FILE).write_text(content)
    commit(open_store(), 1)


def test_a_directory_that_cannot_be_written_is_an_error_of_ours(tmp_path, open_store):
    """A traceback from pathlib tells nobody what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be claimed"):
        open_store(tmp_path / "file" / "checkpoints")


def test_a_claim_on_a_full_disk_is_no_room(tmp_path, open_store, monkeypatch):
    """With the code of an unusable directory (74) a launcher would not start the job again."""

    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(workspace, "Fence", refuse)
    with pytest.raises(DiskFull, match="cannot be claimed"):
        open_store()


def test_a_second_job_ends_with_73_and_disturbs_nothing(tmp_path):
    """Two people, or a requeue and a person, start the same directory."""
    first = ForkedJob(tmp_path / "job", steps=10_000, step_s=0.01)
    process = first.start()
    first.wait_for_step(process, 2)
    second = ForkedJob(tmp_path / "job", steps=10_000)
    assert second.run() == 73, second.output
    assert "is in use by a running job" in second.output
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert [a.number for a in first.history.attempts] == [1]


def test_a_job_whose_token_was_replaced_ends_with_73(tmp_path):
    """It must not train on for days what it may not save."""
    job = ForkedJob(
        tmp_path / "job", steps=10_000, step_s=0.01, policy={"checkpoint": {"every_steps": 20}}
    )
    process = job.start()
    job.wait_for_step(process, 2)
    token = json.loads((job.checkpoints / TOKEN_FILE).read_text())
    (job.checkpoints / "new").write_text(json.dumps(token | {"token": "newer"}))
    (job.checkpoints / "new").rename(job.checkpoints / TOKEN_FILE)
    assert process.wait() == 73
    assert "newer attempt" in job.output
