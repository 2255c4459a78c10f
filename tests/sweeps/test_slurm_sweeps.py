"""`forge status`, `cancel` and `resume` of a sweep on a cluster, without its launcher."""

import contextlib
import json

import pytest
from cluster import wait_for
from slurm_apps import HOLD, SlurmApp, table, undisturbed, urgent  # noqa: F401 - a fixture
from sweeps import assert_same_job

import forge
from forge.jobdir.job_state import State

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def app(cluster, tmp_path):
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app")) as found:
        yield found


def seen(app):
    """The jobs as `forge status` prints them."""
    return json.loads(app.forge("status", str(app.sweep_dir), "--json"))["jobs"]


def test_jobs_are_seen_cancelled_and_resumed_from_their_directory(app, undisturbed):  # noqa: F811
    """Running, held in the queue, preempted; then one is ended, and all go on with more time."""
    kinds = ["one", "two", "held"]
    sweep = app.start(
        f"kind={','.join(kinds)}",
        "++idle=[two,held]",
        f"+holds={table(one=1, two=1)}",
        "hydra.launcher.wait=false",
        "hydra.launcher.array_parallelism=2",
    )
    assert sweep.wait() == 0, sweep.output
    for kind in ("one", "two"):
        wait_for((app.gates / f"{kind} 0").exists, f"step of {kind}")
    read = forge.sweep(app.sweep_dir)
    assert [job.state for job in read.jobs] == [State.running, State.starting, State.queued]
    one, two, held = read.jobs
    assert (one.node, one.step) == ("n1", HOLD)
    assert seen(app)[2]["slurm_id"] == held.slurm_id
    assert held.slurm_id.endswith("_2")
    assert "JobArrayTaskLimit" in app.forge("why", str(app.sweep_dir), "2")

    text = app.forge("cancel", str(app.sweep_dir), "0", "2")
    assert "job 2: cancelled before it has run" in text
    jobs = app.jobs_by_place()
    wait_for(lambda: forge.sweep(app.sweep_dir).jobs[0].state is State.stopped, "end of job 0")
    first = forge.sweep(app.sweep_dir).jobs[0]
    assert first.is_cancelled
    assert first.because.startswith("cancelled by ")
    assert first.checkpoint.step == HOLD + 1  # it had the time to save

    urgent(app.cluster, app.folder, "--nodelist=n1")
    wait_for(lambda: jobs[1].restarts == 1, "requeue of job 1")
    assert forge.sweep(app.sweep_dir).jobs[1].ends == {"preempted": 1}
    app.cluster.run("scancel", two.slurm_id)
    wait_for(lambda: seen(app)[1]["state"] == "stopped", "end of job 1")
    assert seen(app)[1]["is_cancelled"]  # squeue says so: no wrapper was there to record it

    text = app.forge("resume", str(app.sweep_dir), "--dry-run")
    assert "job 0 was cancelled; `forge resume 0` starts it" in text
    assert "job 2 was cancelled; `forge resume 2` starts it" in text
    text = app.forge("resume", str(app.sweep_dir), "0", "1", "2", "timeout_min=20")
    assert "timeout_min=20 from now on" in text
    assert "job 2: submitted as " in text

    def are_done():
        return all(job.state is State.finished for job in forge.sweep(app.sweep_dir).jobs)

    wait_for(lambda: any(job.slurm_id for job in forge.sweep(app.sweep_dir).jobs), "their ids")
    assert jobs[2].cluster.run("squeue", "--noheader", "--format=%l").split()[0] == "20:00"
    wait_for(are_done, "end of all jobs", 250)
    assert_same_job(jobs[0], undisturbed)


def test_a_job_that_is_held_after_a_requeue_is_said_to_be_held(app):
    """It would wait for ever: sites requeue jobs so, to have a person look at them first."""
    held = f"+holds={table(one=9, two=9)}"
    sweep = app.start("kind=one,two", "++idle=[one,two]", held, "hydra.launcher.wait=false")
    assert sweep.wait() == 0, sweep.output
    for kind in ("one", "two"):
        wait_for((app.gates / f"{kind} 0").exists, f"start of {kind}")
    ids = [job.slurm_id for job in forge.sweep(app.sweep_dir).jobs]
    app.cluster.run("scontrol", "requeuehold", ids[0])
    app.cluster.run("scontrol", "requeuehold", "State=SpecialExit", ids[1])
    listed = ("squeue", "--noheader", "--array", "--format=%T %r")
    held = ["PENDING job requeued in held state", "SPECIAL_EXIT job requeued in held state"]
    wait_for(lambda: sorted(app.cluster.run(*listed).splitlines()) == held, "requeue of both jobs")
    for number, slurm_id in enumerate(ids):
        text = " ".join(app.forge("why", str(app.sweep_dir), str(number)).split())
        assert "job requeued in held state, which does not end by itself" in text
        assert f"`scontrol release {slurm_id}` lets Slurm start it" in text
    app.cluster.clear()
