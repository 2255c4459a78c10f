"""Why a job is stopped, asked of a true controller at the moment of the signal."""

import os

import pytest
from cluster import submit, wait_for

from forge.errors import NoAnswer, NoSuchJob, NotRequeueable
from forge.slurm import client
from forge.slurm.job_info import JobInfo, Why

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STAYS = """
trap 'echo >> told' TERM
touch begun
until [ -e over ]; do sleep 0.1; done
"""
WHOLE = ["--exclusive", "--nodes=2"]


@pytest.fixture
def ours(cluster, tmp_path, monkeypatch):
    """This process's Slurm commands talk to the cluster."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    (tmp_path / "over").touch()  # else Slurm waits for its KillWait before it kills the task
    cluster.clear()


def start(cluster, folder, *options):
    (folder / "task.sh").write_text(STAYS)
    # A step: the notice of a preemption goes to the tasks of steps, not to the batch script.
    job = submit(
        cluster,
        folder,
        "trap : TERM\nsrun --ntasks=1 --nodes=1 --overlap sh task.sh",
        "--requeue",
        *options,
    )
    wait_for((folder / "begun").exists, "start of the job")
    return job


def told(folder):
    return (folder / "told").exists()


def test_nobody_stops_it(ours, tmp_path):
    """SIGTERM by hand: Slurm does not notice, and training continues."""
    job = start(ours, tmp_path)
    assert client.why(client.show(job, 60), 0) is Why.unknown


def test_a_preemption_with_grace_time(ours, tmp_path):
    """Save, requeue."""
    job = start(ours, tmp_path, *WHOLE)
    submit(ours, tmp_path, "sleep 60", "--partition=urgent", *WHOLE)
    wait_for(lambda: told(tmp_path), "SIGTERM")
    assert client.why(client.show(job, 60), 0) is Why.preempted


def test_a_preemption_without_grace_time(ours, tmp_path):
    """Slurm has requeued it already: doing it once more would be once too often."""
    job = start(ours, tmp_path, "--partition=zero", *WHOLE)
    submit(ours, tmp_path, "sleep 60", "--partition=urgent", *WHOLE)
    wait_for(lambda: told(tmp_path), "SIGTERM")
    assert client.why(client.show(job, 60), 0) is Why.requeued


def test_a_cancel(ours, tmp_path):
    """Bringing it back would raise the dead against their owner's wish."""
    job = start(ours, tmp_path)
    ours.run("scancel", job)
    wait_for(lambda: told(tmp_path), "SIGTERM")
    assert client.why(client.show(job, 60), 0) is Why.cancelled


def test_a_preemption_by_cancel(ours, tmp_path):
    """PreemptMode=CANCEL without grace time: COMPLETING, as after a cancel, and not requeued."""
    job = start(ours, tmp_path, "--partition=cancel", *WHOLE)
    submit(ours, tmp_path, "sleep 60", "--partition=urgent", *WHOLE)
    wait_for(lambda: told(tmp_path), "SIGTERM")
    assert client.why(client.show(job, 60), 0) is Why.preempted
    client.requeue(job, 60)
    assert client.why(client.show(job, 60), 0) is Why.requeued


def test_a_cancel_where_preemption_is_a_cancel(ours, tmp_path):
    """Only the times tell them apart."""
    job = start(ours, tmp_path, "--partition=cancel", *WHOLE)
    ours.run("scancel", job)
    wait_for(lambda: told(tmp_path), "SIGTERM")
    assert client.why(client.show(job, 60), 0) is Why.cancelled


def test_a_node_that_is_down(ours):
    """Whatever ran there is no failure of its own."""
    assert client.lost_nodes("n[1-2]", 60) == []
    ours.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    assert client.lost_nodes("n[1-2]", 60) == ["n2"]
    assert client.lost_nodes("n1", 60) == []
    ours.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    wait_for(lambda: client.lost_nodes("n[1-2]", 60) == [], "n2")


def test_a_requeue_that_slurm_refuses_is_told_at_once(ours, tmp_path):
    """No minute of questions while the job is being killed."""
    job = start(ours, tmp_path)
    ours.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    with pytest.raises(NotRequeueable, match="disabled"):
        client.requeue(job, 60)


@pytest.mark.parametrize(
    ("end_time", "why"),
    [("2026-01-01T00:00:09", Why.cancelled), ("2026-01-01T00:00:07", Why.preempted)],
)
def test_a_cancel_after_the_notice_of_a_preemption_by_cancel(end_time, why, monkeypatch):
    """Slurm sets PreemptTime once more when it ends the job itself; a cancel leaves it behind."""
    monkeypatch.setattr(client, "requeues_preempted", lambda partition, within_s: False)
    text = "JobId=7 JobState=COMPLETING Requeue=1 Restarts=0 PreemptTime=2026-01-01T00:00:07"
    assert client.why(JobInfo.parse(f"{text} EndTime={end_time} Partition=low"), 0) is why


def test_a_cancel_in_the_middle_of_a_preemption(ours, tmp_path):
    """PreemptTime stays set, and `scontrol requeue` would still work."""
    job = start(ours, tmp_path, *WHOLE)
    submit(ours, tmp_path, "sleep 60", "--partition=urgent", *WHOLE)
    wait_for(lambda: told(tmp_path), "SIGTERM")
    ours.run("scancel", job)
    wait_for(lambda: client.show(job, 60).state != "RUNNING", "the cancel")
    info = client.show(job, 60)
    assert info.preempt_time is not None
    assert client.why(info, 0) is Why.cancelled


def test_a_job_that_is_unknown_and_a_controller_that_is_gone(ours, tmp_path, monkeypatch):
    """The first is an answer; the second is none, and is not waited for in vain."""
    with pytest.raises(NoSuchJob):
        client.show("987654", 60)
    conf = (ours.folder / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(conf.replace("SlurmctldPort=", "SlurmctldPort=1 #"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(NoAnswer, match="show job 1"):
        client.show("1", 3)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"SLURM_JOB_ID": "12"}, "12"),
        (
            {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"},
            "12_3",
        ),
    ],
)
def test_an_array_task_is_named_by_its_array(environment, name):
    """`scontrol requeue 12` inside task 3 would requeue the whole array."""
    assert client.own_job(environment) == name
