"""Jobs of several ranks under `hydra/launcher=local`, with all that happens to one of them."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from harness import Process, made_once, until
from ranked_apps import RankedApp, assert_same_ranks
from sweeps import App, command_in

from forge.process import processes

HOLD = 15


@pytest.fixture(scope="module")
def undisturbed(shared_folder):
    """A job that nobody interrupted."""

    def make(folder):
        RankedApp(folder / "app").finish("lr=0.1")

    folder = made_once(shared_folder / "undisturbed_ranks", make)
    return RankedApp.job(type("", (), {"sweep_dir": folder / "app/sweep"})(), 0)


@pytest.fixture
def make(tmp_path):
    apps = []

    def made(**more):
        apps.append(RankedApp(tmp_path / "app", **more))
        return apps[-1]

    yield made
    for app in apps:
        app.close()


def let_go(app):
    (app.folder / "hold 0").unlink()


def test_what_ranks_leave_is_one_jobs(undisturbed):
    """All ranks share one `.hydra`, one result and one set of checkpoints; each has its own log."""
    folder = undisturbed.directory
    names = {path.name for path in folder.iterdir()}
    assert {"output.log", "output.log.1", "train.log", "train.log.1", ".hydra"} <= names
    assert "Training finished at step 40" in undisturbed.output
    assert "Training" not in (folder / "output.log.1").read_text()
    assert undisturbed.state["counts"]["restarts"] == 0


def test_ctrl_c_and_a_signal_at_one_rank_stop_all_after_the_same_step(make, undisturbed):
    """The sweep goes on by the printed command. A signal to one process stops all ranks; the job
    restarts and repeats no step.
    """
    app = make()
    app.hold(0, HOLD)
    sweep = app.start("lr=0.1")
    job = app.job(0)
    job.held()
    sweep.signal(signal.SIGINT)  # each rank holds until it comes there
    assert sweep.wait() == 130, sweep.output
    until(job.is_free, "the job's end")
    assert job.state["state"] == "stopped"
    for path in job.directory.glob("holds *"):
        path.unlink()
    app.hold(0, HOLD + 10)
    _, folder, _, *typed = command_in(sweep.output)
    again = Process(typed, app.folder / "again.txt", Path(folder), app.popen)
    app.started.append(again)
    os.kill(job.held()[1], signal.SIGUSR2)
    let_go(app)
    assert again.wait() == 0, again.output + job.output
    assert_same_ranks(job, undisturbed)
    assert job.repeated == [0, 0]
    assert [one["code"] for one in job.events("end")] == [130, 75, 0]
    assert job.state["counts"]["preemptions"] == job.state["counts"]["restarts"] == 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.proofs)])
def test_a_killed_rank_ends_the_others_and_the_job_starts_again_once(make, undisturbed, rank):
    """The other ranks are in a collective that cannot end; a budget counts jobs, not ranks."""
    app = make()
    app.hold(0, HOLD)
    sweep = app.start("lr=0.1")
    job = app.job(0)
    pids = job.held()
    os.kill(pids[rank], signal.SIGKILL)
    let_go(app)
    assert sweep.wait() == 0, sweep.output + job.output
    assert_same_ranks(job, undisturbed)
    first, last = job.events("end")
    assert (first["code"], first["reason"], last["code"]) == (-9, "crashed", 0)
    assert (
        "is gone; on this rank, " in (job.directory / f"output.log{['.1', ''][rank]}").read_text()
    )
    assert job.state["counts"]["failures"] == job.state["counts"]["restarts"] == 1
    assert job.repeated == [HOLD - 10]
    assert not any(processes.variable(pid, "FORGE_JOB_TOKEN") for pid in pids)


def test_what_a_rank_raises_fails_the_job_by_its_name(make):
    """A restart would raise the same error: the job fails at once, on all ranks."""
    app = make(
        misbehave="""
        if step == 5 and os.environ["RANK"] == "1":
            raise RuntimeError("planted")
        """
    )
    done = app.run("lr=0.1")
    job = app.job(0)
    assert done.returncode != 0
    assert "rank 1 of 2: RuntimeError: planted; its output is in output.log.1" in job.output
    assert 'raise RuntimeError("planted")' in done.stdout, "the launcher shows that rank's frames"
    assert "c10d" not in done.stdout
    assert (job.state["code"], job.state["rank"]) == (1, 1)
    assert job.state["counts"]["restarts"] == 0
    assert 'RuntimeError("planted")' in (job.directory / "output.log.1").read_text()
    assert job.is_free()


@pytest.mark.proofs
@pytest.mark.slow
def test_a_rank_that_stands_for_ever_ends_the_job_at_its_deadline(make, undisturbed):
    """Rank 1 blocks the GIL, rank 0 waits in a collective: stacks, SIGKILL, one restart."""
    app = make(
        misbehave="""
        if step == 15 and RESTARTS == 0 and os.environ["RANK"] == "1":
            Path(out_of(cfg), "stands").write_text(str(os.getpid()))
            import ctypes
            while True:
                ctypes.PyDLL(None).sleep(600)
        """.replace("out_of(cfg)", "HydraConfig.get().runtime.output_dir")
    )
    sweep = app.start("lr=0.1", "resilience.shutdown.timeout_s=3")
    job = app.job(0)
    mark = job.directory / "stands"
    until(lambda: mark.exists() and mark.read_text(), "rank 1 to stand")
    for pid in processes.descendants(job.wrapper):
        processes.send(pid, signal.SIGUSR2)
    assert sweep.wait() == 0, sweep.output + job.output
    assert_same_ranks(job, undisturbed)
    assert [one["reason"] for one in job.events("end")] == ["forced", "finished"]
    assert job.state["counts"]["restarts"] == 1
    assert "The stacks of all its threads" in (job.directory / "output.log.1").read_text()


LOSES = """
    import os, sys, time
    from pathlib import Path
    import hydra
    from forge.errors import Exit, Reason

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        if os.environ["FORGE_RANK"] == "1":
            raise Exit(70, "rank 0 is gone", Reason.rank_lost)
        while not Path(os.environ["FORGE_JOB_DIR"], ".forge/report.json.1").exists():
            time.sleep(0.01)
        sys.exit(78)

    if __name__ == "__main__":
        main()
"""
BARE = """
    defaults: [{resilience: default}, _self_]
    resilience: {health: {enabled: false}, requeue: {max_failures: 0}}
"""


def test_a_rank_that_has_lost_another_is_not_the_cause_though_it_ends_first(tmp_path):
    """A forced exit would be restarted at once: on a full disk, or with a config that is wrong."""
    with contextlib.closing(App(tmp_path / "app", LOSES, BARE)) as app:
        assert app.run("hydra.launcher.tasks_per_job=2").returncode == 1
        state = app.job(0).state
    assert (state["reason"], state["code"], state["rank"]) == ("bad_config", 78, 0)
