"""The Slurm launcher in the submitting process: its errors, its waits, and the results."""

import contextlib
import json
import shlex
import signal
from pathlib import Path

import pytest
from cluster import Cluster, missing
from harness import FORGE, PATIENCE_S
from slurm_apps import BARE_CONF, SlurmApp
from sweeps import command_in

from forge.hydra_app import frozen
from forge.jobdir.job_files import PLAN, REPORT, STATE, forge_dir, read_json
from forge.jobdir.ledger import read as read_ledger
from forge.process import processes

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

WAITS = """
    import os, time
    from pathlib import Path
    import hydra
    from hydra.core.hydra_config import HydraConfig

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg):
        gates = Path(cfg.gates)
        out = Path(HydraConfig.get().runtime.output_dir)
        (out / "began").touch()
        (gates / f"{cfg.kind} began").touch()
        while not any((gates / name).exists() for name in ("go", f"{cfg.kind} goes")):
            time.sleep(0.05)
        return cfg.kind

    if __name__ == "__main__":
        main()
"""


SHORT = """
      checkpoint: {every_steps: 2}
    seed: 3
    steps: 4
    hold: null
"""
HOLDS = """
    if step == 2:
        Path(cfg.gates, "trained").touch()
        while not Path(cfg.gates, "go").exists():
            time.sleep(0.05)
"""


@pytest.fixture
def app(cluster, tmp_path):
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", WAITS, BARE_CONF)) as found:
        yield found


def queued(cluster):
    return cluster.run("squeue", "--noheader", "--array", "--format=%i").split()


def put_before(app, name, script):
    """Let a script run in place of one of Slurm's commands, which is `$real` in it."""
    app.tools = app.folder / "tools"
    app.tools.mkdir(exist_ok=True)
    command = app.tools / name
    path = app.cluster.environment["PATH"]
    command.write_text(f"#!/bin/sh\nreal='env PATH={path} {name}'\n{script}")
    command.chmod(0o755)


def end_at_question(app, kind, is_known):
    """Let this job finish as squeue is called, which knows of the end or has answered before."""
    job = app.jobs()[kind]
    state, gate = forge_dir(job.directory) / STATE, app.gates / f"{kind} goes"
    ends = f"""
        touch {shlex.quote(str(gate))}
        until grep -q '"finished"' {shlex.quote(str(state))}; do sleep 0.05; done
        while $real --noheader --array --format=%i | grep -q '{job.state["job"]}'; do
            sleep 0.05
        done
    """
    asks = 'answer=$($real "$@") || exit\n'
    both = ends + asks if is_known else asks + ends
    put_before(app, "squeue", both + 'echo "$answer"\n')


def test_a_launcher_is_not_needed_and_its_next_start_finds_the_jobs(app):
    """The jobs continue without their launcher, and its next start submits no job twice."""
    overrides = ["kind=a,b", "hydra.launcher.timeout_min=5"]
    first = app.start(*overrides)
    for kind in "ab":
        app.wait_for_gate(f"{kind} began", first)
    first.signal(signal.SIGKILL)
    first.wait()
    jobs = queued(app.cluster)
    assert len(jobs) == 2

    second = app.start(*overrides)
    said = lambda: second.output.partition("Submitted 0 of 2 jobs")[2]  # noqa: E731 - by it alone
    second.wait_for(lambda: said().count("started kind=") >= 2, "look at the jobs")
    second.signal(signal.SIGINT)
    assert second.wait() == 130
    assert "the jobs keep running" in second.output
    assert queued(app.cluster) == jobs

    third = app.run(*overrides, "hydra.launcher.wait=false")
    assert third.returncode == 0, third.stdout
    assert f"squeue --jobs={jobs[0].partition('_')[0]}" in third.stdout
    assert "scancel" in third.stdout
    waits = "To resume (waits until the sweep's jobs in the queue (2 now) end, then resumes the"
    assert waits in third.stdout
    assert command_in(third.stdout)[:2] == ["cd", str(app.folder)]
    assert queued(app.cluster) == jobs
    assert all(frozen.is_frozen(job.directory) for job in app.jobs().values())  # they run with it

    end_at_question(app, "a", is_known=True)
    found = json.loads(app.forge("status", str(app.sweep_dir), "--json"))["jobs"]
    assert [job["state"] for job in found] == ["finished", "starting"]
    end_at_question(app, "b", is_known=False)
    collected = app.go_on_here(third.stdout)
    assert collected.returncode == 0, collected.stdout
    assert "2 of 2 finished" in collected.stdout
    for job in app.jobs().values():
        assert [one["kind"] for one in job.told] == ["attempt", "end", "finished"]
    again = app.run(*overrides)
    assert "2 were finished before" in again.stdout


@pytest.mark.proofs
def test_a_lead_in_the_launcher_s_own_words_is_no_changed_config(cluster, tmp_path):
    """`signal_delay_s` of the launcher is enough: `shutdown.timeout_s` is derived from it."""
    conf = BARE_CONF + SHORT
    with contextlib.closing(SlurmApp(cluster, tmp_path / "app", conf=conf, misbehave=HOLDS)) as app:
        command = ["hydra.launcher.signal_delay_s=30", "hydra.launcher.timeout_min=5"]
        first = app.start(*command)
        app.wait_for_gate("trained", first)
        first.signal(signal.SIGINT)
        assert first.wait() == 130
        app.cluster.clear()
        (app.gates / "go").touch()
        again = app.run(*command)
        (job,) = app.jobs_by_place()
        plan = read_json(forge_dir(job.directory) / PLAN)
    assert again.returncode == 0, again.stdout
    assert read_ledger(job.directory).attempts[1].start_step == 2
    assert "changed since" not in first.output + again.stdout + job.output
    assert (plan["warning_s"], plan["timeout_s"]) == (30, 22.5)


def test_jobs_that_are_cancelled_before_they_run_are_reported(app):
    """One in the queue, of which only Slurm knows, as accounting is off, and one before sbatch."""
    forge = f"{shlex.quote(FORGE)} cancel {shlex.quote(str(app.sweep_dir))} 1"
    put_before(app, "sbatch", f'test -e once || {forge} >once\nexec $real "$@"\n')
    held = app.start(
        "resilience.slurm.timeout_min=5,6", "+hydra.launcher.additional_parameters.hold=true"
    )
    held.wait_for(lambda: len(queued(app.cluster)) == 2, "submission")
    held.wait_for(lambda: "Submitted 2 of 2" in held.output, "submission")
    assert (app.folder / "once").read_text() == "job 1: cancelled before it has run\n"
    one, other = sorted(queued(app.cluster), key=int)
    app.cluster.run("scancel", one)
    app.cluster.run("scontrol", "release", other)
    assert held.wait() == 1
    assert "job 0: stopped: cancelled\n" in held.output
    assert "job 1: stopped: cancelled by " in held.output
    assert "2 stopped ·" in held.output  # and the launcher does not wait any more


def test_slurm_weird_dir(cluster, tmp_path):
    """The path has spaces, quotes and Slurm's `%j`, as in submitit's test of the same name."""
    folder = tmp_path / 'it\'s 100%j of "a" $HOME'
    with contextlib.closing(SlurmApp(cluster, folder, WAITS, BARE_CONF)) as app:
        (app.gates / "go").touch()
        done = app.run("hydra.job.name=two words")
    assert done.returncode == 0, done.stdout
    assert len(list((app.sweep_dir / ".submitit").glob("*_0_log.out"))) == 1
    assert (app.jobs()["plain"].directory / "output.log").exists()


@pytest.mark.proofs
def test_jobs_with_other_limits_are_other_arrays(app):
    """`resilience.slurm.*` can be swept, as `hydra.launcher.*` cannot."""
    (app.gates / "go").touch()
    done = app.run("kind=a,b", "resilience.slurm.timeout_min=5,6")
    assert done.returncode == 0, done.stdout
    numbers = {job.directory.name: job.slurm_id for job in app.jobs_by_place()}
    arrays = [numbers[name].partition("_")[0] for name in "0123"]
    assert arrays[0] == arrays[2] != arrays[1] == arrays[3]
    limits = {app.cluster.show(one)["TimeLimit"] for one in numbers.values()}
    assert limits == {"00:05:00", "00:06:00"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra.launcher.timeout_min=2", "`resilience.signal.warning_s=120` is not below"),
        ("hydra.launcher.partition=lwo", "no such partition"),
        ("hydra.launcher.nodes=3", "has 2"),
        (
            "+hydra.launcher.additional_parameters.nonsense=x",
            "If sbatch names an option above, correct that option.",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(app, override, said):
    """Without the check, each mistake would show only after the wait in the queue."""
    done = app.run("kind=a,b", override)
    assert done.returncode == 78, done.stdout
    assert said in done.stdout
    assert queued(app.cluster) == []


def test_status_and_why_say_that_sbatch_refused_the_jobs(app):
    """They said "2 queued" and "no job needs attention", though nothing was in the queue."""
    nonsense = "+hydra.launcher.additional_parameters.nonsense=x"
    assert app.run("kind=a,b", nonsense).returncode == 78

    def shown(command):
        return " ".join(app.forge(command, str(app.sweep_dir)).split())

    assert "2 failed" in shown("status")
    assert "sbatch refused it: " in shown("status")
    assert "nonsense" in shown("why")
    assert "Correct the option that sbatch names" in shown("why")
    again = app.start("kind=a,b")
    app.wait_for_gate("a began", again)
    assert "refused" not in shown("status")
    (app.gates / "go").touch()
    assert again.wait(PATIENCE_S) == 0, again.output


def test_a_controller_that_does_not_answer_is_waited_for(tmp_path):
    """If slurmctld is restarting while the job ends, the wrapper waits for it, and then decides."""
    problem = missing()
    if problem:
        pytest.skip(problem)
    cluster = Cluster(tmp_path / "slurm")
    try:
        app = SlurmApp(cluster, tmp_path / "app", WAITS, BARE_CONF)
        sweep = app.start()
        app.wait_for_gate("plain began", sweep)
        (job,) = app.jobs_by_place()
        wrapper, controller = job.wrapper, int((cluster.folder / "slurmctld.pid").read_text())
        assert processes.send(controller, signal.SIGSTOP)
        try:
            for pid in job.marked:
                processes.send(pid, signal.SIGUSR1)
            sweep.wait_for(lambda: _asks(wrapper), "question", PATIENCE_S)
            assert (read_json(forge_dir(job.directory) / REPORT) or {})["code"] == 75
            # Longer than the call takes; but after 10 s Slurm's own daemons lose a minute, too.
            signal.sigtimedwait([], 3)
            assert _asks(wrapper)
            assert job.state["state"] == "running"
        finally:
            processes.send(controller, signal.SIGCONT)
        (app.gates / "go").touch()
        assert sweep.wait() == 0, sweep.output
        assert job.restarts == 1
        assert job.counts["preemptions"] == 1
    finally:
        cluster.stop()


def _asks(wrapper):
    """Whether the wrapper waits for the controller's answer."""
    for pid in processes.descendants(wrapper):
        try:
            if b"scontrol" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False
