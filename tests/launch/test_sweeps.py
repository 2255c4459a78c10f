"""A sweep on this machine, from its command line to its exit code."""

import select
import signal

import pytest
from harness import made_once, until
from rows import few
from sweeps import App, SweptJob, assert_same_job, command_in

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


@pytest.mark.parametrize("number", few(1, [signal.SIGHUP, signal.SIGTERM]))
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


def test_jobs_of_a_launcher_that_was_killed_save_and_leave_and_the_next_start_waits(
    app, undisturbed
):
    """An orphan that trains on, unseen, would fight with the next start for the directory.

    Started again at once, the new launcher finds the old jobs in the middle of their saves.
    """
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
    ends = [one["reason"] for one in app.job(0).told if one["kind"] == "end"]
    assert ends == ["orphaned", "finished"]
    assert app.job(0).attempts == 2
    starts = [e for a in ledger.read(app.job(0).directory).attempts for e in a.events]
    assert [one["step"] for one in starts if one["kind"] == "start"] == [0, 4], "it has saved"
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


ENDS = """
    if cfg.lr == 0.1 and step == 3:
        raise ValueError("the tenth")
    if cfg.lr == 0.2 and step == 8:
        os.kill(os.getpid(), signal.SIGTERM)
    if cfg.lr == 0.3 and step == 14:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="session")
def ended(shared_folder):
    """A sweep whose jobs end in different ways; its folder has what it printed."""

    def make(folder):
        app = App(folder / "app", misbehave=ENDS)
        train = app.folder / "train.py"
        bad = "(loss * float('nan') if cfg.lr == 0.4 and step > 4 else loss)"
        train.write_text(train.read_text().replace("loss.backward", f"{bad}.backward"))
        given = ("steps=20", "step_s=0", "resilience.nan.action=halt")
        done = app.run("lr=0.1,0.2,0.3,0.4,0.5", *given)
        (folder / "printed").write_text(done.stdout)
        assert done.returncode == 1, done.stdout

    return made_once(shared_folder / "ended_differently", make)


@pytest.fixture
def printed(ended):
    return (ended / "printed").read_text()


def job(ended, number):
    return SweptJob(ended / "app" / "sweep" / str(number))


def test_an_end_of_one_job_stops_nobody_else(ended):
    """Nine of ten jobs of a night must not be lost to the tenth."""
    states = [job(ended, number).state["state"] for number in range(5)]
    assert states == ["failed", "stopped", "failed", "failed", "finished"]


def test_a_failure_comes_back(ended, printed):
    """With the traceback of the job's own process; a bug of the user's is not retried."""
    assert "ValueError: the tenth" in printed
    assert "train.py" in printed
    assert "job 0: failed at step 3 of 20 (15%): ValueError: the tenth" in printed
    assert job(ended, 0).attempts == 1
    assert any(word.startswith("hydra.sweep.dir=") for word in command_in(printed))


def test_a_stop_of_one_job_by_hand_is_respected(ended):
    """After `kill <pid>` the training saves, and the wrapper does not start it again."""
    assert job(ended, 1).attempts == 1
    assert job(ended, 1).step == 9


def test_a_job_killed_again_and_again_is_given_up_with_the_reason(ended, printed):
    """For example, the model does not fit into memory, so every attempt is killed."""
    assert "max_no_progress=3" in printed
    assert job(ended, 2).attempts == 4  # one that saved step 10, and three that saved nothing new


def test_a_halt_by_the_nan_policy_is_final(ended, printed):
    """The same data would give the same NaN."""
    assert job(ended, 3).state["reason"] == "halted"
    assert job(ended, 3).attempts == 1
    assert "halted by the NaN policy" in printed


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
