"""A cluster that is shared, set up by others, and worked on by hand while a sweep runs."""

import contextlib
import errno
import itertools
import json
import os
import shutil

import pytest
from cluster import wait_for
from plans import planned
from slurm_apps import BARE_CONF, SlurmApp

from forge.config.schema import RequeueConfig
from forge.errors import NotRequeueable, SlurmRefused
from forge.filesystem.locks import take_lock
from forge.jobdir.job_files import STATE, forge_dir, is_busy, read_json, write_json
from forge.jobdir.plan import RequeueLimits, read
from forge.launch.slurm import slurm_wait
from forge.launch.slurm.slurm_wait import QueueWatcher, SubmittedJob
from forge.slurm import client, submitted, wrapper
from forge.slurm.job_info import JobInfo

TRAIN = """
    import os, time
    from pathlib import Path
    import hydra

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        gates = Path(cfg.gates)
        (gates / f"{cfg.kind} began").touch()
        while cfg.kind in ("held", "fails") and (gates / "hold").exists():
            time.sleep(0.05)
        if cfg.kind == "fails" and (gates / "fail").exists():
            raise ValueError("no such luck")
        names = ("OMP_NUM_THREADS", "FORGE_JOB_TOKEN", "FORGE_RESTART_COUNT")
        print("TASK HAS", all(name in os.environ for name in names), flush=True)

    if __name__ == "__main__":
        main()
"""
CONF = f"{BARE_CONF}      shutdown: {{timeout_s: 5}}\n"


@pytest.fixture
def app(cluster, tmp_path):
    """A folder with an app; whatever is left in the queue is cancelled with the test."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", TRAIN, CONF)) as found:
        yield found


def run_to_end(app, *overrides, code=0, **env):
    sweep = app.start(*overrides, **env)
    assert sweep.wait() == code, sweep.output
    return sweep.output


@pytest.mark.slurm
@pytest.mark.slow
def test_the_jobs_of_others_may_be_called_anything(app, cluster, tmp_path):
    """A newline, a bar or a broken letter in somebody's arguments ended every launcher."""
    (tmp_path / "sleep.sh").write_text("#!/bin/sh\nsleep 60\n")
    for argument in ("a\nb|c\nd", b"\xe4"):
        cluster.run(
            "sbatch", "--partition=zero", str(tmp_path / "sleep.sh"), argument, cwd=tmp_path
        )
    (app.gates / "hold").touch()
    sweep = app.start("kind=held", "hydra.launcher.wait=false")
    assert sweep.wait() == 0, sweep.output
    again = app.start("kind=held")
    again.wait_for(lambda: "Submitted 0 of 1 jobs" in again.output, "the launcher")
    app.wait_for_gate("held began", again)
    (app.gates / "hold").unlink()
    assert again.wait() == 0, again.output


@pytest.mark.slurm
@pytest.mark.slow
def test_the_user_s_own_defaults_for_sbatch_hold_and_the_tasks_keep_their_environment(app):
    """Sites have users export SBATCH_ACCOUNT; `export: NONE` is for the batch script alone."""
    run_to_end(
        app,
        "kind=plain",
        "+hydra.launcher.additional_parameters={export: NONE}",
        SBATCH_PARTITION="zero",
    )
    job = app.jobs()["plain"]
    assert job.shown["Partition"] == "zero"
    assert "TASK HAS True" in job.output


@pytest.mark.slurm
@pytest.mark.slow
def test_a_copied_sweep_does_not_take_the_original_s_jobs(app):
    """Otherwise the copied sweep would wait for the original's jobs and report their results."""
    (app.gates / "hold").touch()
    run_to_end(app, "kind=held", "hydra.launcher.wait=false")
    wait_for((app.gates / "held began").exists, "start of the job")  # which then writes no more
    original = app.sweep_dir
    app.sweep_dir = app.folder / "copy"
    shutil.copytree(original, app.sweep_dir)
    output = run_to_end(app, "kind=held", "hydra.launcher.wait=false")
    assert "Submitted 1 of 1 jobs" in output


@pytest.mark.slurm
@pytest.mark.slow
def test_a_failed_job_that_somebody_requeued_by_hand_is_not_submitted_twice(app, cluster):
    """The job is already in the queue, and the launcher waits for it."""
    (app.gates / "fail").touch()
    run_to_end(app, "kind=fails", code=1)
    job = app.jobs()["fails"]
    wait_for(lambda: job.shown["JobState"] == "FAILED", "end of the job")
    cluster.run("scontrol", "requeuehold", job.slurm_id)
    (app.gates / "fail").unlink()
    again = app.start("kind=fails")
    again.wait_for(lambda: "Submitted 0 of 1 jobs" in again.output, "the launcher")
    cluster.run("scontrol", "release", job.slurm_id)
    assert again.wait() == 0, again.output
    assert job.restarts == 1


@pytest.mark.slurm
@pytest.mark.slow
def test_a_config_edited_while_a_job_waits_is_told(app):
    """The job keeps what it was submitted with; a silent old run would be taken for the new."""
    begin = "+hydra.launcher.additional_parameters={begin: now+1hour}"
    run_to_end(app, "kind=plain", "hydra.launcher.wait=false", begin)
    conf = app.folder / "conf.yaml"
    conf.write_text(conf.read_text() + "\nlr: 5\n")
    output = run_to_end(app, "kind=plain", "hydra.launcher.wait=false", begin)
    assert "the config that it was submitted with; the config has changed since" in output
    assert "Submitted 0 of 1 jobs" in output


@pytest.mark.slurm
@pytest.mark.slow
def test_a_script_edited_while_a_job_waits_is_named_if_it_fails(app, cluster):
    """The job has the config of its submission and the script of its start."""
    sweep = app.start("kind=plain", "+hydra.launcher.additional_parameters={hold: true}")
    sweep.wait_for(lambda: "PENDING" in cluster.run("squeue", "-h", "-o%T"), "the job")
    script = app.folder / "train.py"
    script.write_text(script.read_text().replace("cfg.gates", "cfg.new_key"))
    cluster.run("scontrol", "release", cluster.run("squeue", "-h", "-o%F").strip())
    assert sweep.wait() == 1
    state = app.jobs()["plain"].state
    assert (state["state"], state["reason"], state["code"]) == ("failed", "code_changed", 1)
    assert state["because"].startswith("ConfigAttributeError: Key 'new_key' is not in struct; ")
    assert state["because"].endswith("the code changed since the job was submitted: train.py")
    assert state["because"] in sweep.output
    assert f"forge: failed: {state['because']}" in app.jobs()["plain"].output


@pytest.mark.slurm
@pytest.mark.slow
def test_a_setup_that_fails_is_named(app):
    """The job's own log does not exist then."""
    output = run_to_end(app, "kind=plain", "hydra.launcher.setup=['exit 3']", code=1)
    assert "did its setup fail?" in output
    assert str(app.sweep_dir / ".submitit") in output


@pytest.mark.proofs
@pytest.mark.slurm
@pytest.mark.slow
def test_forge_run_in_two_tasks_says_what_to_set(cluster, tmp_path):
    """The result must not depend on which of the two tasks is first."""
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app")) as app:
        output = run_to_end(app, "kind=plain", "hydra.launcher.tasks_per_node=2", code=1)
    assert "bad configuration" in output
    logs = [path.read_text() for path in app.sweep_dir.glob("0/output.log*")]
    assert "call forge.distributed.init() before forge.Run is entered" in "".join(logs)


def test_free_text_in_an_answer_is_not_taken_for_fields():
    """A job's comment that looks like a state must neither requeue the job nor end it."""
    text = (
        "JobId=7 JobName=a Restarts=9 JobState=CANCELLED UserId=me(1) Reason=None"
        " JobState=RUNNING Restarts=0 TimeLimit=01:00:00 RunTime=00:10:00 PreemptTime=None"
        " Command=/x y Comment=x Restarts=7 JobState=CANCELLED"
    )
    told = JobInfo.parse(text)
    assert told.restarts == 0
    assert told.left_s == 3000
    assert told.state == "RUNNING"


def test_a_job_of_an_earlier_launch_leaves_what_a_later_one_has_put_there(tmp_path):
    """After a requeue by hand, two Slurm jobs can have one directory: the later plan applies."""
    job = tmp_path / "job"
    earlier, later = itertools.islice(submitted.bundle_paths(tmp_path), 2)
    for path in (earlier, later):
        submitted.write_bundle(path, b"common", [(job, planned(program=path.name), b"config")], {})
    submitted.unpack(later, 0)
    write_json(forge_dir(job) / STATE, {"state": "running"})
    submitted.unpack(earlier, 0)
    assert read(job).program == later.name
    assert read_json(forge_dir(job) / STATE) == {"state": "running"}


@pytest.mark.parametrize("clock_ns", [0, 1_700_000_000_000_000_000, 1_800_000_000_000_000_000])
def test_a_later_launch_has_the_higher_name_though_the_clock_was_set_back(
    clock_ns, tmp_path, monkeypatch
):
    """Otherwise jobs would take the plans of the earlier launch for the later ones."""
    monkeypatch.setattr(submitted.time, "time_ns", lambda: 1_750_000_000_000_000_000)
    before = list(itertools.islice(submitted.bundle_paths(tmp_path), 2))
    for path in before:
        submitted.write_bundle(path, b"common", [], {})
    monkeypatch.setattr(submitted.time, "time_ns", lambda: clock_ns)
    after = next(submitted.bundle_paths(tmp_path))
    assert max(before).name < after.name
    assert {len(path.stem) for path in (*before, after)} == {19}


def test_a_directory_in_which_a_job_runs_is_left_alone(tmp_path):
    """The job's state file has its used budgets, so a new launch must not overwrite the file."""
    job = tmp_path / "job"
    forge_dir(job).mkdir(parents=True)
    write_json(forge_dir(job) / STATE, {"state": "running"})
    holder = os.open(forge_dir(job) / "lock", os.O_RDWR | os.O_CREAT)
    try:
        assert take_lock(holder)
        path = next(submitted.bundle_paths(tmp_path))
        submitted.write_bundle(path, b"common", [(job, planned(), b"config")], {})
        submitted.unpack(path, 0)
        assert read_json(forge_dir(job) / STATE) == {"state": "running"}
    finally:
        os.close(holder)


def test_a_disk_without_locks_is_no_reason_to_refuse(tmp_path, monkeypatch):
    """Lustre, mounted without `flock`."""
    import fcntl

    from forge.launch.sweep import SweepDir

    def no_locks(fd, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    sweep = SweepDir(tmp_path, set())
    assert sweep.free_number(0) == 0
    sweep.close()
    assert not is_busy(tmp_path)


def test_what_squeue_says_of_a_reason_is_kept(monkeypatch):
    """The script is everything that follows it."""
    text = "7_1|PENDING|Priority|/a b|c.sh x\nrest|of|it\n8|RUNNING|None|(null)\n"
    monkeypatch.setattr(client, "_ask", lambda *command, **more: text)
    found = client.queue()
    assert set(found) == {"7_1", "8"}
    assert found["7_1"].script == "/a b|c.sh x"
    assert found["7_1"].reason == "Priority"


def test_a_cluster_that_is_gone_is_told_once(tmp_path, monkeypatch):
    """The launcher keeps waiting: by the files of its jobs it may still see them end."""
    said = []

    def refuse():
        if len(said) > 1 or asked.append(1) or len(asked) == 9:
            (forge_dir(job.directory) / STATE).write_text(json.dumps(ended))
        raise SlurmRefused("squeue: error: first\nsqueue: error: nobody is there")

    asked = []
    forge_dir(tmp_path).mkdir()
    job = SubmittedJob(0, "lr=1", tmp_path)
    job.slurm_id = "7"
    ended = {"state": "finished", "because": "", "job": "7", "time": 0.0, "pid": 1}
    ended |= {"counts": {"restarts": 0}, "reason": "finished", "code": 0}
    monkeypatch.setattr(client, "queue", refuse)
    monkeypatch.setattr(slurm_wait, "_LOOK_S", 0.0)
    monkeypatch.setattr(slurm_wait, "_ASK_S", 0.0)
    monkeypatch.setattr(slurm_wait.messages, "warn", said.append)
    assert QueueWatcher([job], "none").run() is None
    (line,) = said
    assert line.startswith("The cluster does not answer: squeue: error: nobody is there.")
    assert job.state.name == "finished"


@pytest.mark.parametrize(
    ("restarts", "did"), [("0", ["requeue", 30.0]), ("1", ["requeue", 60.0]), ("2", [])]
)
def test_a_job_that_begins_on_a_full_disk_waits_in_the_queue(restarts, did, tmp_path, monkeypatch):
    """All that wait for a node would begin, and die, in the minutes until there is room again."""
    path, asked = tmp_path / "1.bundle", []
    limits = RequeueLimits.of(RequeueConfig(max_failures=2))
    submitted.write_bundle(path, b"", [(tmp_path / "job", planned(requeue=limits), b"")] * 2, {})

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(submitted, "write_atomically", full)
    monkeypatch.setattr(os, "write", full)  # the batch script's output lies there as well
    monkeypatch.setattr(client, "requeue", lambda job, within_s: asked.append("requeue"))
    monkeypatch.setattr(client, "delay", lambda job, pause_s, within_s: asked.append(pause_s))
    for name, value in {
        "ARRAY_JOB_ID": "7",
        "ARRAY_TASK_ID": "1",
        "RESTART_COUNT": restarts,
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert wrapper.main([str(path)]) == 71
    assert asked[:1] == did[:1]
    for asked_s, pause_s in zip(asked[1:], did[1:], strict=True):
        assert pause_s <= asked_s < 1.5 * pause_s


def test_a_full_disk_and_a_refused_requeue_are_both_said(tmp_path, monkeypatch, capfd):
    """The batch script's output is all that is left of such a job."""
    path = tmp_path / "1.bundle"
    limits = RequeueLimits.of(RequeueConfig(max_failures=2))
    submitted.write_bundle(path, b"", [(tmp_path / "job", planned(requeue=limits), b"")], {})

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(job, within_s):
        raise NotRequeueable("Requested operation is presently disabled")

    monkeypatch.setattr(submitted, "write_atomically", full)
    monkeypatch.setattr(client, "requeue", refuse)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert wrapper.main([str(path)]) == 71
    said = capfd.readouterr().err
    assert "No space left" in said
    assert "could not be requeued: Requested operation is presently disabled" in said
