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

from forge.cli import cancel
from forge.errors import ConfigError, SlurmRefused
from forge.jobdir.job_files import STATE, forge_dir, write_json
from forge.launch.slurm import slurm_wait
from forge.launch.slurm.slurm_wait import QueueWatcher, SubmittedJob
from forge.slurm import client
from forge.slurm.client import Queued

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


def test_nothing_is_submitted_anew_before_the_queue_is_known(tmp_path, monkeypatch):
    """A busy controller can have accepted an earlier try, without an answer from sbatch."""
    train = """
    from forge.launch.slurm import slurm_wait
    slurm_wait._LOOK_S = slurm_wait._ASK_S = 0.0
    """
    cluster = SimpleNamespace(environment={})
    app = SlurmApp(cluster, tmp_path / "app", train + TRAIN, BARE_CONF)
    first, last = submitted(tmp_path / "first"), submitted(tmp_path / "last")
    say(first, "stopped", "7", unrequeued="nobody answered", reason="unanswered", code=75)
    say(last, "failed", "8", ancestors=["7", "9"], reason="crashed", code=1)
    for name, text in {
        "scontrol": "exit 1",
        "sbatch": """
            echo "$2" >>submitted
            case $(wc -l <submitted) in
                1) mkdir -p sweep/0 && cp -r ../first/.forge sweep/0; echo 7;;
                2) echo "sbatch: error: Socket timed out" >&2; exit 1;;
                *) echo 9;;
            esac
        """,
        "squeue": """
            script=$(sed -n 2p submitted)
            [ "$script" ] || exit 0
            echo >>asked
            case $(wc -l <asked) in
                1 | 3) exit 1;;  # after sbatch, and before the next try
                6) cp -r ../last/.forge sweep/0;;
            esac
            echo "8|RUNNING|None|$script"
        """,
    }.items():
        fake(tmp_path, monkeypatch, name, text)
    output = app.run().stdout
    assert len((app.folder / "submitted").read_text().splitlines()) == 2, output
    assert "resubmitted as 8" in output


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


def test_a_job_that_its_wrapper_submitted_anew_is_followed(tmp_path, monkeypatch, at_once):
    """The job's first id is no longer in the queue, but the job is alive under a new id."""
    job = submitted(tmp_path)
    say(job, "starting", "7", successor="9")
    answers = [
        {"7": Queued("PREEMPTED", "None"), "9": Queued("PENDING", "Priority")},
        {"9": Queued("RUNNING", "None")},
    ]
    is_over = threading.Event()

    def queue():
        assert job.slurm_id == "9"
        if answers:
            return answers.pop(0)
        if not is_over.is_set():  # the thread may ask once more, when the directory is gone
            is_over.set()
            say(job, "finished", "12", ancestors=["7", "9"], reason="finished", code=0)
        return {}

    monkeypatch.setattr(client, "queue", queue)
    assert QueueWatcher([job], "none").run() is None
    assert (job.state.name, job.slurm_id) == ("finished", "12")


def test_a_successor_that_nobody_has_told_of_is_found_by_its_batch_script(
    tmp_path, monkeypatch, at_once
):
    """The wrapper was killed between sbatch and its note: else the job would be submitted twice."""
    job = submitted(tmp_path, slurm_id="7_3")
    job.script = "/sweep/1.sh"
    say(job, "running", "7_3")
    others = {
        "7_3": Queued("PREEMPTED", "None", "/sweep/1.sh"),
        "7_4": Queued("RUNNING", "None", "/sweep/1.sh"),
        "8_3": Queued("RUNNING", "None", "/sweep/2.sh"),
    }

    def queue():
        if job.slurm_id == "9_3":
            say(job, "finished", "9_3", ancestors=["7_3"], reason="finished", code=0)
        return others | {"9_3": Queued("PENDING", "Priority", "/sweep/1.sh")}

    monkeypatch.setattr(client, "queue", queue)
    assert QueueWatcher([job], "none").run() is None
    assert (job.state.name, job.slurm_id) == ("finished", "9_3")


def test_what_a_wrapper_could_not_requeue_is_submitted_anew_once(tmp_path, monkeypatch, at_once):
    """The controller was away for longer than the allocation; now it answers."""
    job, calls = submitted(tmp_path), []
    say(job, "stopped", "7", unrequeued="nobody answered", reason="unanswered", code=75)
    states = ["RUNNING", "COMPLETING", "COMPLETED", "COMPLETED", "COMPLETED"]
    problems = [ConfigError(["sbatch: not now"], "The submission"), OSError(28, "no space left")]

    def queue():
        if job.slurm_id == "9":
            say(job, "finished", "9", reason="finished", code=0)
            return {}
        return {"7": Queued(states.pop(0), "None")}

    def anew(jobs):
        calls.append((len(states), *(one.slurm_id for one in jobs)))
        if problems:
            raise problems.pop(0)
        job.slurm_id = "9"

    monkeypatch.setattr(client, "queue", queue)
    assert QueueWatcher([job], "none", anew).run() is None
    assert calls == [(2, "7"), (1, "7"), (0, "7")]  # not while it was leaving
    assert (job.state.name, job.slurm_id) == ("finished", "9")


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


@pytest.mark.parametrize("command", ["scancel", "forge cancel"])
def test_what_a_wrapper_could_not_requeue_is_not_submitted_anew_if_it_was_cancelled(
    command, tmp_path, monkeypatch, at_once, capfd
):
    """The job's state is final, but the launcher would start it again."""
    job = submitted(tmp_path / "0")
    forge_dir(tmp_path).mkdir()
    say(job, "stopped", "7", unrequeued="nobody answered", reason="unanswered", code=75)
    state = "CANCELLED"
    if command == "forge cancel":
        state = "FAILED"  # the batch script has ended by itself
        entry = {"number": 0, "subdir": "0", "overrides": ["lr=1"]}
        write_json(forge_dir(tmp_path) / "jobs.jsonl", entry)
        assert cancel.main([str(tmp_path), "0"]) == 0
        assert capfd.readouterr().out == "job 0: cancelled; it does not start again\n"
    monkeypatch.setattr(client, "queue", lambda: {"7": Queued(state, "None")})
    watcher = QueueWatcher([job], "none", lambda jobs: pytest.fail("it is submitted again"))
    assert watcher.run() is None
    assert (job.state.name, job.reason.name, job.because) == ("stopped", "cancelled", "cancelled")


def test_a_state_of_another_submission_is_not_taken_for_this_one_s(tmp_path):
    """The state file of an earlier launch does not describe the job that is pending now."""
    job = submitted(tmp_path, slurm_id="60")
    say(job, "failed", "12", ancestors=["7"], successor="13", reason="failed", code=1)
    job.poll()
    assert (job.state.name, job.slurm_id) == ("queued", "60")
