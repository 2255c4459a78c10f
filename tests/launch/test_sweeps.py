"""A sweep on this machine, from its command line to its exit code."""

import json
import select
import signal

import pytest
from harness import until
from sweeps import App, assert_same_job, command_in

from forge.jobdir import ledger
from forge.process import processes


def test_jobs_that_are_killed_finish_with_the_same_bits(app, undisturbed):
    """If task, supervisor and wrapper are killed, the sweep continues and has the same result."""
    app.hold(0, 12, 22, 32)
    sweep = app.start("lr=0.1,0.2", "steps=40", "step_s=0")
    for kind, attempt in (("task", 1), ("supervisor", 2), ("wrapper", 3)):
        app.job(0).wait_for_attempt(attempt)
        app.job(0).wait_for_step(10 * attempt + 2)
        app.job(0).kill(kind)
    assert sweep.wait() == 0, sweep.output
    for number, rate in ((0, "0.1"), (1, "0.2")):
        assert_same_job(app.job(number), undisturbed[rate])
        assert app.job(number).is_free()
    assert app.job(0).attempts == 4
    assert app.job(0).state["counts"]["failures"] == 3
    assert app.job(1).attempts == 1
    assert "killed by SIGKILL" in sweep.output


def test_ctrl_c_stops_a_sweep_and_the_printed_command_goes_on(app, undisturbed):
    """A user who needs the machine for an hour must not lose the work of a day."""
    app.hold(0, 5)
    sweep = app.start("lr=0.1", "step_s=0")
    app.job(0).wait_for_step(5)
    sweep.signal(signal.SIGINT)
    assert sweep.wait() == 130
    assert app.job(0).is_free()
    assert app.job(0).state["state"] == "stopped"
    again = app.go_on(sweep.output, in_shell=True)
    assert again.returncode == 0, again.stdout
    assert_same_job(app.job(0), undisturbed["0.1"])
    assert app.job(0).attempts == 2


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=["SIGHUP", "SIGTERM"])
def test_a_signal_that_comes_twice_has_the_jobs_save_all_the_same(app, number):
    """Kernel and shell, or srun and Slurm, can both send the signal: not a second request."""
    app.hold(0, 2)
    sweep = app.start("lr=0.1", "step_s=0")
    app.job(0).wait_for_step(2)
    for _ in range(3):
        sweep.signal(number)
        select.select([], [], [], 0.02)  # two signals at the same time arrive as one
    assert sweep.wait() == 128 + number
    assert f"{number.name}: 1 job, saving and exiting" in sweep.output
    assert command_in(sweep.output)[:2] == ["cd", str(app.folder)]
    assert app.job(0).state["state"] == "stopped"
    assert app.job(0).state["code"] == 143
    assert ledger.saved_steps(app.job(0).directory, "checkpoints") >= 2


def test_jobs_of_a_launcher_that_was_killed_save_and_leave(app, undisturbed):
    """An orphan that trains on, unseen, would fight with the next start for the directory."""
    for number in (0, 1):
        app.hold(number, 5)
    sweep = app.start("lr=0.1,0.2", "step_s=0")
    for number in (0, 1):
        app.job(number).wait_for_step(5)
    sweep.signal(signal.SIGKILL)
    sweep.wait()
    for number in (0, 1):
        until(app.job(number).is_free, "the orphans' end")
        assert app.job(number).state["reason"] == "orphaned"
    app.finish("lr=0.1,0.2", "step_s=0")
    for number, rate in ((0, "0.1"), (1, "0.2")):
        assert_same_job(app.job(number), undisturbed[rate])


def test_the_next_start_waits_for_orphans_that_are_still_leaving(app, undisturbed):
    """Started again at once, the new launcher finds the old jobs in the middle of their saves."""
    app.hold(0, 3)
    sweep = app.start("lr=0.1", "step_s=0")
    app.job(0).wait_for_step(3)
    wrapper, task = app.job(0).wrapper, app.job(0).task
    processes.send(task, signal.SIGSTOP)
    sweep.signal(signal.SIGKILL)
    sweep.wait()
    again = app.start("lr=0.1", "step_s=0")
    until(lambda: "waiting for processes of an earlier" in app.job(0).output, "the second start")
    assert task in app.job(0).marked
    processes.send(task, signal.SIGCONT)
    assert again.wait() == 0, again.output
    assert app.job(0).wrapper != wrapper
    assert_same_job(app.job(0), undisturbed["0.1"])


def test_orphans_without_a_wrapper_and_a_supervisor_are_ended(app, undisturbed):
    """All three parents killed at one moment: only the mark in the environment is left."""
    app = App(
        app.folder.with_name("other"),
        misbehave="""
            if step == 5 and not Path(__file__).with_name("again").exists():
                import subprocess
                subprocess.Popen(["sleep", "300"], start_new_session=True)
                time.sleep(600)
        """,
    )
    sweep = app.start("lr=0.1", "step_s=0.05")
    job = app.job(0)
    job.wait_for_step(5)
    wrapper, supervisor, task = job.wrapper, job.supervisor, job.task
    until(lambda: len({*job.marked} - {wrapper, supervisor, task}) == 1, "the start of `sleep`")
    for number in (signal.SIGSTOP, signal.SIGKILL):  # no process sees another one end
        for pid in (sweep.pid, wrapper, supervisor):
            assert processes.send(pid, number)
    sweep.wait()
    until(lambda: task not in job.marked, "the task's end")  # the kernel's; `sleep` is left
    assert len(job.marked) == 1
    (app.folder / "again").touch()
    app.finish("lr=0.1", "step_s=0.05")
    assert job.is_free()
    assert_same_job(job, undisturbed["0.1"])


def test_a_failure_stops_nobody_else_and_comes_back(app):
    """Nine of ten jobs of a night must not be lost to the tenth."""
    app = App(
        app.folder.with_name("other"),
        misbehave="""
            if cfg.lr == 0.1 and step == 3:
                raise ValueError("the tenth")
        """,
    )
    done = app.run("lr=0.1,0.2,0.3", "steps=10")
    assert done.returncode == 1
    assert "ValueError: the tenth" in done.stdout
    assert "train.py" in done.stdout  # the traceback of the job's own process
    assert [app.job(n).state["state"] for n in range(3)] == ["failed", "finished", "finished"]
    assert "job 0: failed at step 3 of 10 (30%): ValueError: the tenth" in done.stdout
    assert app.job(0).attempts == 1, "a bug of the user's is not retried"
    assert any(word.startswith("hydra.sweep.dir=") for word in command_in(done.stdout))


def test_a_job_killed_again_and_again_is_given_up_with_the_reason(app):
    """For example, the model does not fit into memory, so every attempt is killed."""
    app = App(
        app.folder.with_name("other"),
        misbehave="""
            if step == 14 and cfg.lr == 0.1:
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    done = app.run("lr=0.1,0.2", "steps=20")
    assert done.returncode == 1
    assert "max_no_progress=3" in done.stdout
    assert app.job(0).attempts == 4  # one that saved step 10, and three that saved nothing new
    assert app.job(1).state["state"] == "finished"


def test_finished_jobs_are_found_by_their_overrides_and_not_run_again(app):
    """A second command with more points would give every job another number."""
    app.finish("lr=0.1,0.2", "steps=10", "step_s=0")
    pids = [app.job(n).state["pid"] for n in (0, 1)]
    text = app.finish("lr=0.3,0.2,0.1", "steps=10", "step_s=0")
    assert [app.job(n).state["pid"] for n in (0, 1)] == pids
    assert text.count("started") == 1
    assert json.loads((app.job(2).directory / ".forge/plan.json").read_text())["overrides"] == [
        "lr=0.3",
        "step_s=0",
        "steps=10",
    ]
    assert app.job(2).state["state"] == "finished"


def test_two_launchers_do_not_run_one_sweep(app):
    """Otherwise the same command in a second terminal would run every job twice."""
    endless = ["lr=0.1", "step_s=0.1", "steps=100000"]
    sweep = app.start(*endless)
    app.job(0).wait_for_step(1)
    second = app.run(*endless)
    assert second.returncode == 73
    assert f"pid {sweep.pid}" in second.stdout
    sweep.signal(signal.SIGINT)
    assert sweep.wait() == 130


def test_the_second_ctrl_c_ends_what_does_not_react(app):
    """A user who presses Ctrl-C twice does not want to wait for a save."""
    app = App(
        app.folder.with_name("other"),
        misbehave="""
            if step == 3:
                time.sleep(600)
        """,
    )
    sweep = app.start("lr=0.1", "steps=10", "resilience.shutdown.timeout_s=0")
    app.job(0).wait_for_step(3)
    sweep.signal(signal.SIGINT)
    until(lambda: "saving and exiting" in sweep.output, "the first Ctrl+C")
    sweep.signal(signal.SIGINT)
    assert sweep.wait() == 130
    until(app.job(0).is_free, "everybody's end")
