"""Signals to whole jobs: true processes, true signals, at every stage of a job's life."""

import os
import signal

import pytest
import warm
from forked import ForkedJob, completed
from harness import Job, Process, assert_same_run, full_pipe, told, wait_for
from rows import few

from forge.jobdir import ledger
from forge.process import processes

CODES = {"TERM": 143, "INT": 130, "HUP": 129, "USR1": 75, "USR2": 75}


@pytest.fixture(autouse=True)
def _hangups_are_not_ignored():
    """Tests that run under nohup: what we start would ignore them, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def number(name: str) -> int:
    return signal.Signals["SIG" + name]


def stage_job(tmp_path, stage, kind=ForkedJob, **spec) -> Job:
    return kind(tmp_path / "job", "stages.py", stage=stage, **spec)


def kind_of(name):
    """By one signal as Python itself begins and ends; by the others forked."""
    return Job if name == "TERM" else ForkedJob


def start_and_wait(job: Job, **env):
    process = job.start(**env)
    process.wait_for((job.directory / "ready").exists, "the stage")
    return process


def events(job: Job) -> list[str]:
    path = job.directory / "events.txt"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", CODES)
def test_a_signal_saves_at_the_next_boundary_and_ends_with_its_code(tmp_path, name):
    """The code tells the launcher whether to run the job again."""
    job = stage_job(tmp_path, "loop", kind_of(name), callbacks=True)
    process = start_and_wait(job)
    process.signal(number(name))
    assert process.wait() == CODES[name]
    assert (job.checkpoints / "latest").resolve().name == "step_3"
    # The last registered first; one that fails does not keep the next from running.
    assert events(job) == ["callback last", "callback fails", "callback first", "finally in with"]
    assert "a callback's own bug" in job.output


def test_what_follows_the_with_block_runs_only_when_training_is_finished(tmp_path):
    """A stopped job must not publish half-trained weights."""
    job = stage_job(tmp_path, "loop")
    process = start_and_wait(job)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert "after" not in events(job)
    assert job.run() == 0
    assert events(job)[-1] == "after"


def test_a_stop_in_the_last_step_keeps_the_work_and_the_rest_runs_at_the_next_start(tmp_path):
    """All steps are done, but the evaluation after them is not."""
    job = stage_job(tmp_path, "last_step", at=4)
    process = start_and_wait(job)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert "after" not in events(job)
    assert job.run() == 0
    assert "after" in events(job)
    assert job.steps_repeated == [0]


def test_a_signal_after_the_with_block_ends_at_once(tmp_path):
    """Training is finished and saved: there is nothing to wait for."""
    job = stage_job(tmp_path, "after", early_callbacks=True)
    process = start_and_wait(job)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert events(job)[-1] == "callback first"


@pytest.mark.parametrize("name", CODES)
def test_a_signal_during_imports_costs_nothing(tmp_path, name):
    """No handler is there yet: the process dies of it, and starts again from the same place."""
    job = stage_job(tmp_path, "imports")
    process = Process(job.command, job.directory / "output.txt")
    process.wait_for((job.directory / "ready").exists, "the stage")
    process.signal(number(name))
    assert process.wait() != 0
    job.spec["stage"] = "none"
    assert job.run() == 0


@pytest.mark.parametrize("name", CODES)
def test_a_signal_while_the_trainer_is_built_ends_promptly_and_runs_callbacks(tmp_path, name):
    """`forge.on_stop` works before a Run exists; `finally` blocks run too."""
    job = stage_job(tmp_path, "building", early_callbacks=True)
    process = start_and_wait(job)
    process.signal(number(name))
    assert process.wait() == CODES[name]
    assert events(job) == ["finally", "callback last", "callback fails", "callback first"]


def test_a_signal_in_an_evaluation_stops_there_without_losing_a_step(tmp_path):
    """An evaluation may be longer than the time that a preemption leaves."""
    job = stage_job(tmp_path, "evaluation", steps=5)
    process = start_and_wait(job)
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    job.spec["stage"] = "none"
    assert job.run(FORGE_RESUME="changed") == 0
    assert job.steps_repeated == [0]


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_repeated_signals_change_nothing(tmp_path, name):
    """Slurm sends SIGTERM twice; impatient people send more, until the process is gone."""
    job = stage_job(tmp_path, "loop", callbacks=True)
    process = start_and_wait(job)
    while process.popen.poll() is None:
        try:
            process.signal(number(name))
        except ProcessLookupError:
            break
        # As fast as the process can take them, and never waiting for it.
        os.sched_yield()
    assert process.wait() == CODES[name]
    assert (job.checkpoints / "latest").resolve().name == "step_3"


def test_the_save_action_saves_and_goes_on(tmp_path):
    """`signal.actions.USR1=save` is a checkpoint on demand."""
    job = stage_job(tmp_path, "loop", policy={"signal": {"actions": {"USR1": "save"}}})
    process = start_and_wait(job)
    process.signal(signal.SIGUSR1)
    process.wait_for(lambda: not process.is_pending(signal.SIGUSR1), "the signal to arrive")
    (job.directory / "go").touch()
    assert process.wait() == 0
    saves = [e for e in job.history.attempts[0].events if e["kind"] == "save"]
    assert [(e["step"], e["reason"]) for e in saves] == [(3, "requested"), (5, "end")]


def test_an_ignored_signal_is_ignored(tmp_path):
    """`signal.actions.TERM=ignore` leaves the decision to another signal."""
    job = stage_job(tmp_path, "loop", policy={"signal": {"actions": {"TERM": "ignore"}}})
    process = start_and_wait(job)
    process.signal(signal.SIGTERM)
    process.wait_for(lambda: not process.is_pending(signal.SIGTERM), "the signal to arrive")
    (job.directory / "go").touch()
    assert process.wait() == 0


def test_the_forced_exit_comes_while_the_main_thread_sits_in_a_c_call(tmp_path):
    """The deadline is armed by a thread: the main thread never gets to run a handler."""
    policy = {"shutdown": {"timeout_s": 1.0}}
    job = stage_job(tmp_path, "c_call", policy=policy, children=["stubborn"])
    process = start_and_wait(job)
    process.signal(signal.SIGTERM)
    assert process.wait() == 70
    (stacks,) = (job.checkpoints / ".forge").glob("stacks_*.txt")
    assert "stages.py" in stacks.read_text()
    assert "forge-signals" in stacks.read_text() or "Thread 0x" in stacks.read_text()
    assert process.is_session_gone()


def test_a_stderr_that_nobody_reads_stops_neither_the_save_nor_the_exit(tmp_path):
    """A full pipe blocks whoever writes to it; the save comes first and the exit all the same."""
    job = stage_job(tmp_path, "loop")
    reader, writer = full_pipe()
    process = warm.Popen(
        job.command,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    try:
        wait_for((job.directory / "ready").exists, process, "the stage")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        os.close(reader)
    assert (job.checkpoints / "latest").resolve().name == "step_3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start", "step"),
    few(1, [("TERM", "fork", 12), ("USR2", "fork", 12), ("TERM", "spawn", 5)]),
)
def test_workers_outlive_the_signal_that_slurm_sends_to_every_process(
    tmp_path, undisturbed, start, name, step
):
    """A worker that dies takes the save with it: 'DataLoader worker exited unexpectedly'.

    Step 12 is in the second epoch: workers of the first have gone.
    """
    spec = {"workers": 2, "augment": "seeded", "steps": step + 3}
    job = ForkedJob(tmp_path / "job", hold=step, start=start, **spec)
    process = job.start()
    job.wait_for_step(process, step)
    assert len(process.session_pids()) >= 3
    process.signal_session(number(name))
    assert process.wait() == CODES[name]
    assert "exited unexpectedly" not in job.output
    assert process.is_session_gone()
    job.spec = spec
    assert job.run(FORGE_RESUME="changed") == 0
    assert job.steps_repeated == [0]
    assert_same_run(job, undisturbed(**spec))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loaded", "called", "held", "forked", "stopped"])
def test_children_of_the_script_outlive_it_whatever_they_and_their_parent_are_doing(tmp_path, kind):
    """Workers of a loader that the script iterates; a child in a long C call; one just forked."""
    job = ForkedJob(tmp_path / "job", "children.py", kind=kind)
    process = job.start()
    process.wait_for((job.directory / "ready").exists, "the children")
    if kind == "stopped":
        process.signal(signal.SIGSTOP)
        process.wait_for(lambda: processes.is_suspended(process.pid), "its stop")
    process.signal_session(signal.SIGTERM)
    if kind == "stopped":
        signal.sigtimedwait([], 0.5)  # a child decides within half of it
        process.signal(signal.SIGCONT)
    assert process.wait() == 143, job.output
    assert (job.checkpoints / "latest").exists()
    assert process.is_session_gone()


@pytest.mark.parametrize("kind", ["terminated", "daemon", "persistent"])
def test_children_end_when_python_ends_them_by_sigterm_and_waits(tmp_path, kind):
    """As a pool does, whatever its workers do; and at exit with daemons that block signals."""
    job = ForkedJob(tmp_path / "job", "children.py", kind=kind)
    process = job.start()
    assert process.wait() == 0, job.output
    assert "Traceback" not in job.output
    assert process.is_session_gone()


def test_helpers_that_were_forked_or_shielded_outlive_it_too(tmp_path):
    """Loggers and executors are needed until the save is done; then they are ended."""
    job = ForkedJob(tmp_path / "job", "helpers.py")
    process = job.start()
    process.wait_for((job.directory / "ready").exists, "helpers")
    process.signal_session(signal.SIGTERM)
    answers = process.wait_for(lambda: told(job.directory / "answers.txt"), "the helpers' answers")
    assert process.wait() == 143, job.output
    assert answers.split() == ["forked", "shielded", "pool"]
    assert process.is_session_gone()


def test_progress_is_known_while_a_job_runs(tmp_path):
    """The demo, and people, read it without touching the job."""
    job = stage_job(tmp_path, "loop")
    process = start_and_wait(job)
    assert ledger.read_progress(job.checkpoints)[:2] == (1, 2)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert ledger.read_progress(job.checkpoints)[:2] == (1, 2)


CHILDREN = """
import signal, subprocess, sys
from torch.utils.data import DataLoader
from forge.data.workers import iter_with_blocked_signals
from forge.shutdown import stopping

heard = []
signal.signal(signal.SIGCHLD, lambda number, frame: heard.append(number))
def stay(worker_id):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

killed = sys.argv[1] == "killed"
loader = DataLoader(range(8), num_workers=1, worker_init_fn=stay if killed else None)
batches = iter(loader) if killed else iter_with_blocked_signals(loader)
next(batches)
assert not stopping.is_stopping()
try:
    raise stopping.leave(75, "a test")
finally:
    assert stopping.is_stopping()
    for worker in batches._workers:
        worker.join()  # its signal has come
    heard.clear()
    subprocess.run(["true"])
    print("heard", len(heard), flush=True)
"""


@pytest.mark.parametrize("workers", ["shielded", "killed"])
def test_children_are_the_user_s_to_hear_of_again_after_a_stop(tmp_path, workers):
    """DataLoader's handler comes first, and raises where a worker was killed: that ends nothing."""
    done = completed(["-c", CHILDREN, workers], tmp_path)
    assert done.returncode == 75, done.stdout
    assert "heard 1" in done.stdout or workers == "killed"
    assert "Traceback" not in done.stdout
