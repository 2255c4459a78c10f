"""A launcher that waits for Slurm: its messages, the end of the wait, and requeued jobs."""

import contextlib
import os
import signal
import stat
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from cluster import submit, wait_for
from slurm_apps import BARE_CONF, SlurmApp

from forge.errors import SlurmRefused
from forge.jobdir.job_files import STATE, forge_dir, write_json
from forge.launch.slurm import slurm_wait
from forge.launch.slurm.slurm_wait import QueueWatcher, SubmittedJob
from forge.slurm import client

TRAIN = """
    import time
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        Path(cfg.gates, f"{cfg.kind} began").touch()

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def app(cluster, tmp_path):
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, BARE_CONF)) as found:
        yield found


# -- what it says ------------------------------------------------------------------------------


@pytest.mark.slurm
@pytest.mark.slow
def test_why_jobs_wait_is_said_and_what_to_do_about_it(app, cluster, tmp_path):
    """Otherwise the launcher would wait forever without a message."""
    failed = submit(cluster, tmp_path, "exit 1", "--partition=urgent")
    wait_for(lambda: cluster.show(failed)["JobState"] == "FAILED", "a job that fails")
    cluster.run("scontrol", "update", "PartitionName=zero", "State=DOWN")
    try:
        sweep = app.start(
            f"resilience.slurm.dependency=null,'afterok:{failed}'",
            "hydra.launcher.partition=zero",
        )
        for said in ("job 0 waiting: PartitionDown", "job 1 waiting: DependencyNeverSatisfied"):
            sweep.wait_for(lambda said=said: f"{said}, which does not" in sweep.output, said)
        one, other = cluster.run("squeue", "--noheader", "--sort=i", "--format=%i").split()
        cluster.run("scontrol", "uhold", one)
        line = "job 0 waiting: JobHeldUser, which does not end by itself: `scontrol"
        sweep.wait_for(lambda: line in sweep.output, "word of the hold")
    finally:
        cluster.run("scontrol", "update", "PartitionName=zero", "State=UP")
    for what, job in (("scontrol release", one), ("scancel", other)):
        assert f"`{what} {job}`" in sweep.output
        cluster.run(*what.split(), job)
    assert sweep.wait() == 1
    assert "1 of 2 finished" in sweep.output
    assert sweep.output.count("waiting: DependencyNeverSatisfied") == 1


# -- submitting --------------------------------------------------------------------------------


def fake(tmp_path, monkeypatch, name, text):
    """A command of Slurm's that does as the text says."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_what_sbatch_says_is_the_error(tmp_path, monkeypatch):
    """Regression test: after 60 s the error was "timed out", without sbatch's own message."""
    fake(tmp_path, monkeypatch, "sbatch", "echo 'sbatch: error: no room' >&2; exit 1")
    with pytest.raises(SlurmRefused, match=r"^sbatch: error: no room$"):
        client.submit(tmp_path / "job.sh")


def test_an_sbatch_that_never_ends_is_ended_with_its_words(tmp_path, monkeypatch):
    fake(tmp_path, monkeypatch, "sbatch", "echo words >&2; exec sleep 600")
    monkeypatch.setattr(client, "_SUBMIT_S", 1.0)
    with pytest.raises(SlurmRefused, match=r"^words\nsbatch: .* timed out"):
        client.submit(tmp_path / "job.sh")


@pytest.mark.slurm
@pytest.mark.slow
def test_a_submission_whose_answer_was_lost_is_found_and_not_done_twice(
    app, cluster, tmp_path, monkeypatch
):
    """A busy controller can accept the job although sbatch reports a timeout."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "sbatch"
    path.write_text(
        f'#!/bin/sh\nPATH="{cluster.environment["PATH"]}" sbatch "$@" >>"{tmp_path}/taken"\n'
        "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2\nexit 1\n"
    )
    path.chmod(0o755)
    environment = cluster.environment | {"PATH": f"{folder}:{cluster.environment['PATH']}"}
    monkeypatch.setattr(type(cluster), "environment", environment)
    sweep = app.start("kind=a,b")
    assert sweep.wait() == 0, sweep.output
    (taken,) = (tmp_path / "taken").read_text().split()
    assert {job.slurm_id for job in app.jobs().values()} == {f"{taken}_0", f"{taken}_1"}


# -- what ends it ------------------------------------------------------------------------------


def submitted(folder, number=0, slurm_id="7"):
    forge_dir(folder).mkdir(parents=True, exist_ok=True)
    return SubmittedJob(number, "lr=1", folder, slurm_id=slurm_id)


def say(job, state, slurm_id, **more):
    """Write the state file as the job's wrapper does."""
    counts = {"restarts": 1, "excluded": 0}
    content = {"state": state, "because": "", "job": slurm_id, "time": 0.0, "pid": 1}
    write_json(forge_dir(job.directory) / STATE, content | {"counts": counts} | more)


@pytest.fixture
def signals():
    """Restores the signal handlers after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_ctrl_c_ends_the_waiting_at_once_however_many_jobs_there_are(
    tmp_path, monkeypatch, signals
):
    """The launcher must not wait for the next poll, which takes six seconds with 1000 jobs."""
    shown = threading.Event()
    monkeypatch.setattr(slurm_wait, "_LOOK_S", 120.0)
    watcher = QueueWatcher([submitted(tmp_path)], "none")
    poll = watcher.poll

    def polled():
        shown.set()
        return poll()

    monkeypatch.setattr(watcher, "poll", polled)

    def interrupt():
        shown.wait()
        time.sleep(0.2)  # into the pause between two polls
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    threading.Thread(target=interrupt).start()
    assert watcher.run() == signal.SIGINT
    assert time.monotonic() - began < 60


def test_a_ctrl_c_does_not_wait_for_a_busy_controller(tmp_path, monkeypatch, signals):
    """squeue may take a minute to say nothing."""
    answered = threading.Event()

    def asked():
        os.kill(os.getpid(), signal.SIGINT)
        answered.wait(100)
        raise SlurmRefused("squeue: no answer")

    monkeypatch.setattr(client, "queue", asked)
    monkeypatch.setattr(slurm_wait, "_ASK_S", 0.0)
    began = time.monotonic()
    try:
        assert QueueWatcher([submitted(tmp_path)], "none").run() == signal.SIGINT
        assert time.monotonic() - began < 60
    finally:
        answered.set()


@pytest.mark.parametrize("count", [1, 50])
def test_squeue_is_asked_every_15_seconds_however_many_jobs_there_are(count, tmp_path, monkeypatch):
    """A controller has thousands of jobs to schedule, and sites ask their users not to poll."""
    clock, asked = [1000.0], []
    monkeypatch.setattr(slurm_wait, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(client, "queue", lambda: asked.append(clock[0]) or {})
    jobs = [submitted(tmp_path / str(number), number) for number in range(count)]
    watcher = QueueWatcher(jobs, "none")
    monkeypatch.setattr(watcher, "_display", SimpleNamespace(is_live=True), raising=False)
    for job in jobs:
        monkeypatch.setattr(job, "learn", lambda queued, now: None)
    for _ in range(130):
        assert watcher.poll()
        if watcher._question is not None:
            watcher._question.join()
        clock[0] += 0.5
    assert asked == [1015.0, 1030.0, 1045.0, 1060.0]


# -- what it follows ---------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """Waits without pauses between their polls, whose last query ends with the test."""
    for name in ("_LOOK_S", "_LOOK_PER_JOB_S", "_ASK_S"):
        monkeypatch.setattr(slurm_wait, name, 0.0)
    yield
    for thread in threading.enumerate():
        if thread.name == "forge-squeue":
            thread.join()


def test_only_the_end_before_a_requeue_by_hand_is_ignored(tmp_path):
    """A job that starts and fails while the launcher submits others has another end."""
    job = submitted(tmp_path)
    say(job, "failed", "7", reason="failed", code=1)
    before = job.read_state()
    job.forget(before)
    job.poll()
    assert job.state.name == "queued"
    again = submitted(tmp_path)
    say(again, "failed", "7", reason="halted", code=76)
    again.forget(before)
    again.poll()
    assert (again.state.name, again.code) == ("failed", 76)


def test_a_state_of_another_submission_is_not_taken_for_this_one_s(tmp_path):
    """The state file of an earlier launch does not describe the job that is pending now."""
    job = submitted(tmp_path, slurm_id="60")
    say(job, "failed", "12", reason="failed", code=1)
    job.poll()
    assert (job.state.name, job.slurm_id) == ("queued", "60")
