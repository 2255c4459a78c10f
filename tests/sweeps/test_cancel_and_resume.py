"""`forge cancel` and `forge resume` of a sweep on this machine, from another process."""

import os
import shutil
import signal
import sys

import pytest
from harness import FORGE, Process, made_once, until
from looked_at import CONF, TRAINING
from sweeps import App, SweptJob, assert_same_job
from two_users import ATTACKER

import forge
from forge.cli import cancel
from forge.jobdir import jsonl, process_id
from forge.jobdir.cancel_request import CancelRequest
from forge.jobdir.job_files import job_ledger
from forge.jobdir.job_state import State
from forge.launch import record
from forge.launch.again import local, slurm
from forge.launch.record import LaunchRecord
from forge.process import processes
from forge.slurm import client
from forge.slurm.submitted import Submitted, submissions
from forge.sweeps.job import SweepJob


def states(app):
    return [job.state for job in forge.sweep(app.sweep_dir).jobs]


@pytest.fixture(scope="module")
def undisturbed(shared_folder):
    """The jobs at two rates, that nothing interrupted."""

    def make(folder):
        App(folder / "app", TRAINING, CONF).finish("lr=0.1,0.2")

    sweep = made_once(shared_folder / "not_cancelled", make) / "app" / "sweep"
    return [SweptJob(sweep / str(number)) for number in range(2)]


def test_a_cancelled_job_saves_and_starts_again_only_if_it_is_named(app, undisturbed, capfd):
    """A person ends one job of many, looks, and continues it the next day: the same bits."""
    app.hold(0, 12)
    sweep = app.start("lr=0.1,0.2", "hydra.launcher.n_jobs=1")
    app.job(0).wait_for_step(12)
    text = app.forge("cancel", str(app.sweep_dir), "0", "1")
    assert "job 1: cancelled before it has run" in text
    sweep.wait()
    assert states(app) == [State.stopped, State.stopped]
    first, second = forge.sweep(app.sweep_dir).jobs
    assert first.is_cancelled
    assert first.because.startswith("cancelled by ")
    assert first.checkpoint.step == 13
    assert second.attempts == 0
    text = app.forge("resume", str(app.sweep_dir))
    assert "job 0 was cancelled; `forge resume 0` starts it" in text
    assert "no job has to start" in text
    assert "start again" not in app.forge("status", str(app.sweep_dir))  # as many as resume starts
    text = app.forge("resume", str(app.sweep_dir), "0", "1", "n_jobs=2")
    assert "job 0 (lr=0.1) starts again from step_13" in text
    assert states(app) == [State.finished, State.finished]
    assert_same_job(app.job(0), undisturbed[0])
    assert_same_job(app.job(1), undisturbed[1])

    # Two at once: the second has read the jobs before the first has run them.
    assert local.run(app.sweep_dir, [first, second], record.read(app.sweep_dir), {}) == 0
    assert capfd.readouterr().err.count("has finished: nothing to do") == 2
    kinds = [one["kind"] for one in jsonl.events(job_ledger(app.job(0).directory))]
    assert kinds[:1] + [one for one in kinds if one in ("cancel", "resumed")] == [
        *("attempt", "cancel", "resumed")
    ]


def test_cancel_now_kills_without_a_save(app):
    """A job that does not react, or whose result nobody needs."""
    app.hold(0, 12)
    sweep = app.start("lr=0.1")
    app.job(0).wait_for_step(12)
    app.forge("cancel", "--now", str(app.sweep_dir), "0")
    sweep.wait()
    (job,) = forge.sweep(app.sweep_dir).jobs
    assert job.state is State.stopped
    assert job.checkpoint.step == 10
    assert app.job(0).is_free()


def test_all_jobs_are_cancelled_only_if_that_is_said(app, swept):
    """`forge cancel` alone must not end a hundred jobs."""
    text = app.forge("cancel", str(swept), code=2)
    assert "`--all` cancels all 4 jobs" in text


def test_a_request_that_comes_before_the_first_attempt_prevents_it(app):
    """The launcher starts a wrapper for the job, on whatever machine; the wrapper looks."""
    app.hold(0, 5)
    sweep = app.start("lr=0.1,0.2", "hydra.launcher.n_jobs=1")
    app.job(0).wait_for_step(5)
    CancelRequest().write(app.job(1).directory)
    (app.folder / "hold 0").unlink()
    sweep.wait()
    first, second = forge.sweep(app.sweep_dir).jobs
    assert (first.state, second.state) == (State.finished, State.stopped)
    assert second.attempts == 0


def test_a_sweep_without_a_launcher_is_resumed_with_its_old_config_where_it_is_now(
    app, undisturbed
):
    """Launcher and jobs were killed, and the config was edited since: the old one runs.

    A scratch disk was cleaned up, too: the directory was moved to another one.
    """
    app.hold(0, 12)
    sweep = app.start("lr=0.1,0.2", "hydra.launcher.n_jobs=1")
    app.job(0).wait_for_step(12)
    sweep.signal(signal.SIGSTOP)
    for pid in [app.job(0).wrapper, *app.job(0).marked]:
        os.kill(pid, signal.SIGKILL)
    sweep.signal(signal.SIGKILL)
    sweep.wait()
    until(app.job(0).is_free, "the end of the job")
    assert states(app) == [State.lost, State.queued]
    conf = app.folder / "conf.yaml"
    conf.write_text(conf.read_text().replace("seed: 3", "seed: 4"))
    script = app.folder / "train.py"
    script.write_text(script.read_text() + "\n# edited\n")
    text = app.forge("resume", str(app.sweep_dir), "--dry-run")
    assert "job 0 (lr=0.1) starts again from step_10: it was lost" in text
    assert "job 1 (lr=0.2) starts again from step 0: it was queued" in text
    assert states(app) == [State.lost, State.queued]
    (app.folder / "hold 0").unlink()
    app.sweep_dir = app.sweep_dir.rename(app.folder / "moved")
    text = app.forge("resume", str(app.sweep_dir))
    assert "The code has changed since job 0, 1 was launched: train.py" in text
    assert states(app) == [State.finished, State.finished]
    assert_same_job(app.job(0), undisturbed[0])
    assert_same_job(app.job(1), undisturbed[1])
    assert not (app.folder / "sweep").exists()


def test_a_copy_of_a_sweep_that_runs_is_resumed_beside_it(app, undisturbed):
    """Both are the same jobs by all that their files say: each ends its own processes only."""
    app.hold(0, 12)
    sweep = app.start("lr=0.1")
    app.job(0).wait_for_step(12)
    copy, original = app.folder / "copy", app.job(0)
    shutil.copytree(app.sweep_dir, copy, symlinks=True)
    command = [sys.executable, FORGE, "resume", str(copy)]
    resumed = Process(command, app.folder / "resumed.txt", app.folder, app.popen)
    SweptJob(copy / "0").wait_for_attempt(2)
    (app.folder / "hold 0").unlink()
    assert resumed.wait() == 0, resumed.output
    assert sweep.wait() == 0, sweep.output
    for job in (original, SweptJob(copy / "0")):
        assert_same_job(job, undisturbed[0])
        assert job.state["counts"]["restarts"] == 0
    assert original.attempts == 1


def test_two_that_resume_a_sweep_at_once_submit_its_job_once(tmp_path, monkeypatch, capfd):
    """The second has read the job before the first has submitted it under another id."""
    failed = SweepJob(3, tmp_path / "3", (), State.failed, slurm_id="100_3")
    submissions(tmp_path).mkdir(parents=True)
    submitted = Submitted(tmp_path)
    for script, slurm_id, numbers in (("1.sh", "100", [0, 1, 2, 3]), ("2.sh", "101", [3])):
        submitted.note_request(tmp_path / script, numbers, [""] * len(numbers))
        submitted.note_answer(tmp_path / script, slurm_id)
    ended = client.Queued("FAILED", "NonZeroExitCode", str(tmp_path / "1.sh"))
    alive = client.Queued("PENDING", "Priority", str(tmp_path / "2.sh"))
    monkeypatch.setattr(client, "queue", lambda: {"100_3": ended, "101": alive})
    assert slurm.run(tmp_path, [failed], LaunchRecord(launcher="slurm", options={}), {}) == 0
    assert "job 3 is in the queue as 101: nothing to do" in capfd.readouterr().err
    assert Submitted(tmp_path).ids[3] == "101"


def test_only_failed_jobs_start_with_failed(app):
    """And those that raised run again, since a person has asked for it."""
    assert app.run("mode=ends,raises", "lr=0.2").returncode == 1
    text = app.forge("resume", str(app.sweep_dir), "--failed", code=1)
    assert "1 job finished" in text
    assert "job 1 (mode=raises) starts again from step_10: it was failed" in text
    assert forge.sweep(app.sweep_dir).jobs[1].attempts == 2
    assert len(forge.sweep(app.sweep_dir).jobs[1].history()) == 2
    assert app.forge("logs", str(app.sweep_dir), "1").count("resumes at step 10") == 1


def test_options_that_the_launcher_does_not_have_are_refused(app, swept, tmp_path):
    """The policy is frozen, and a typo must not be taken for the name of a job."""
    copy = tmp_path / "sweep"
    shutil.copytree(swept, copy, symlinks=True)
    text = app.forge("resume", str(copy), "resilience.nan.action=halt", code=78)
    assert "changes only options of the launcher" in text
    text = app.forge("resume", str(copy), "hydra.launcher.njobs=2", code=78)
    assert "expected an option of the launcher" in text
    (copy / ".forge" / "launch.json").unlink()
    text = app.forge("resume", str(copy), "1", code=78)
    assert "resume.sh" in text


def test_a_run_without_a_launcher_gets_the_signal_itself(app, monkeypatch, capfd):
    """`python train.py`: no wrapper looks for requests, and only the pid names the process."""
    app.hold("single", 12)
    command = [sys.executable, "train.py", "hydra.run.dir=single"]
    run = Process(command, app.folder / "single.txt", app.folder, app.popen)
    SweptJob(app.folder / "single").wait_for_step(12)
    (job,) = forge.sweep(app.folder / "single").jobs
    assert not job.has_wrapper

    # After a power cut no end is recorded, and another process can have the pid.
    lost = app.folder / "lost"
    shutil.copytree(app.folder / "single/.forge/ledger", lost / ".forge/ledger")
    (ledger,) = (lost / ".forge/ledger").iterdir()
    whole, open_pidfd = ledger.read_text(), processes.open_pidfd

    def reused(pid):
        ledger.write_text(whole.replace(f'"ticks": "{process_id.ticks(pid)}"', '"ticks": "1"'))
        return open_pidfd(pid)

    monkeypatch.setattr(processes, "open_pidfd", reused)
    assert cancel.main([str(lost), "--now"]) == 0
    assert f"job 0: process {job.pid} has ended" in capfd.readouterr().out
    assert forge.sweep(lost).jobs[0].state is State.lost
    monkeypatch.undo()

    text = app.forge("cancel", str(app.folder / "single"))
    assert f"job 0: SIGTERM to process {job.pid}" in text
    assert run.wait(60) == 143
    (job,) = forge.sweep(app.folder / "single").jobs
    assert job.state is State.stopped
    assert job.checkpoint.step == job.step == 13


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_nothing_is_cancelled_or_resumed_by_the_files_of_another_user(app, swept):
    """Another user knows the pid and the start of any process, and could name it in a ledger.

    Without a path, the newest run below a shared directory can be that of another user.
    """
    app.hold("mine", 12)
    command = [sys.executable, "train.py", "hydra.run.dir=outputs/mine"]
    run = Process(command, app.folder / "mine.txt", app.folder, app.popen)
    mine = SweptJob(app.folder / "outputs" / "mine")
    mine.wait_for_step(12)
    theirs = app.folder / "outputs" / "theirs"
    shutil.copytree(mine.directory / ".forge", theirs / ".forge")
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, ATTACKER, ATTACKER)
    text = app.forge("cancel", str(theirs), code=78)
    assert f"{theirs / '.forge'} belongs to " in text
    assert "SIGTERM" not in text
    assert app.forge("status", str(theirs))  # reading is harmless
    assert "SIGTERM to process" in app.forge("cancel")
    assert run.wait(60) == 143
    assert forge.sweep(mine.directory).jobs[0].state is State.stopped

    shutil.copytree(swept, app.sweep_dir, symlinks=True)
    os.chown(app.sweep_dir / "1" / ".forge", ATTACKER, ATTACKER)
    for name in ("cancel", "resume"):
        assert "belongs to " in app.forge(name, str(app.sweep_dir), "1", code=78)
