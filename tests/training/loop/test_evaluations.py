"""Functions of `run.every`: when they run, and the effects of a stop in one of them."""

import itertools
import math
import os
import signal

import pytest
import torch
from harness import assert_same_run

import forge
from forge.checkpoint.format import manifest
from forge.jobdir import ledger, process_id
from forge.process import memory
from forge.shutdown import stopping
from forge.training import shutdown
from forge.training.loop import snapshot_holder
from forge.training.saver import Saver

SCRIPT = "evaluates.py"
KINDS = ["draws", "switches", "swaps", "swallows", "remembers", "elsewhere"]
KEPT = [(0, 0), (2, 2), (3, 1), (5, 1)]


# -- when they run -----------------------------------------------------------------------------


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """`a_run(n, register)` trains in the same directory; each call counts as a new process."""
    numbers = itertools.count()
    monkeypatch.setattr(process_id, "owner", lambda: f"process {next(numbers)}")

    def train(n, register, loop=lambda run, step: None, **policy):
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy.setdefault("checkpoint", {"dir": str(tmp_path / "job"), "every_steps": 4})
        with forge.Run(policy, model=model, optimizer=optimizer) as run:
            register(run)
            for step in run.steps(n):
                loss = model(torch.randn(3, 2)).square().mean()
                loss.backward()
                run.update(loss, optimizer)
                run.log(loss=loss)
                loop(run, step)
        return run

    train.directory = tmp_path / "job"
    return train


@pytest.mark.parametrize("enabled", [True, False])
def test_functions_run_in_order_after_so_many_steps_and_at_the_end(a_run, enabled):
    """`enabled=False` must not change the evaluations."""
    seen = []

    def register(run):
        run.every(3)(lambda step: seen.append(("third", step, run.step)))
        run.every(5, at_end=True)(lambda step: seen.append(("fifth", step, run.step)))
        run.every(at_end=True)(lambda step: seen.append(("end", step, run.step)))

    a_run(7, register, enabled=enabled)
    steps = [("third", 3), ("fifth", 5), ("third", 6), ("fifth", 7), ("end", 7)]
    assert seen == [(name, step, step) for name, step in steps]


def test_what_is_logged_counts_for_the_last_step_and_is_in_that_boundary_s_checkpoint(a_run):
    """A checkpoint has the metrics of its own weights."""

    def register(run):
        run.every(4)(lambda step: run.log(held_out=step * 10))

    a_run(8, register)
    assert ledger.read(a_run.directory).metrics[3].keys() == {"loss", "held_out"}
    found = manifest.read(a_run.directory / "step_4")
    assert (found.metrics["held_out"], found.logged_at["held_out"]) == (40, 3)


def test_a_boundary_that_two_loops_share_runs_its_functions_once(a_run, tmp_path):
    """The second loop begins at the boundary at which the first ended."""
    seen = []
    model = torch.nn.Linear(2, 1)
    with forge.Run({"checkpoint": {"dir": str(tmp_path / "job")}}, model=model) as run:
        run.every(2, at_end=True)(seen.append)
        for _ in run.steps(4):
            pass
        for _ in run.steps(5):
            pass
    assert seen == [2, 4, 5]


def test_two_functions_of_a_name_are_told_apart_and_one_that_is_gone_is_named(a_run, caplog):
    """A resumed job knows by name which functions still have to run."""
    names = []

    def register(run):
        for _ in range(2):
            run.every(4)(lambda step: None)
        names.extend(run._evaluations.due(4, is_end=False))
        run._evaluations.run(["lost"], 4)

    a_run(1, register)
    assert len(set(names)) == 2
    assert "At step 4 the run.every function lost is due" in caplog.text


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3"])
def test_a_number_of_steps_that_makes_no_sense_is_refused(a_run, steps):
    with pytest.raises(forge.ForgeError, match=r"run\.every\(.*expected a positive number"):
        a_run(1, lambda run: run.every(steps)(lambda step: None))


def test_a_function_that_would_never_run_is_refused(a_run):
    with pytest.raises(forge.ForgeError, match="at_end=True"):
        a_run(1, lambda run: run.every()(lambda step: None))


def test_a_function_is_registered_above_the_loop(a_run):
    """In the loop, each step would register another function."""
    with pytest.raises(forge.ForgeError, match=r"run\.every\(\) was called inside a step"):
        a_run(1, lambda run: None, lambda run, step: run.every(1)(lambda step: None))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_poll_outside_such_a_function_is_an_error_that_names_it(a_run, enabled):
    """No stop is possible there, so the call would promise something that cannot happen."""
    with pytest.raises(forge.ForgeError, match=r"@run\.every\(100\)"):
        a_run(1, lambda run: None, lambda run, step: run.check_stop(), enabled=enabled)


def test_a_save_that_is_asked_for_inside_comes_at_the_end_of_the_boundary(a_run):
    """The checkpoint has the metrics that the functions logged."""

    def register(run):
        @run.every(3)
        def evaluate(step):
            run.save()
            run.log(held_out=1.0)

    a_run(3, register)
    saves = [e for e in ledger.read(a_run.directory).attempts[0].events if e["kind"] == "save"]
    assert saves[0]["reason"] == "requested"
    assert manifest.read(a_run.directory / "step_3").logged_at["held_out"] == 2


# -- a stop in one of them ---------------------------------------------------------------------


def stopped(tmp_path, make_job, undisturbed, places, kind="draws", code=143, **spec):
    """Stop a job in its evaluation at step 9, and resume it. Returns the job."""
    spec = {"kind": kind, **spec}
    job = make_job(tmp_path / "job", script=SCRIPT, places=places, **spec)
    job.run_to_end(code)
    assert_same_run(job, undisturbed(script=SCRIPT, **spec))
    return job


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        # Each place, and a function that catches the stop; `make proofs` runs all pairs.
        pytest.param(kind, place, marks=() if (i, j) in KEPT else pytest.mark.proofs)
        for i, kind in enumerate(KINDS)
        for j, place in enumerate(["start", "poll 1", "late"])
    ],
)
def test_a_stop_in_an_evaluation_changes_no_bit(kind, place, tmp_path, make_job, undisturbed):
    """The function can have swapped weights, switched a mode, caught the stop, or drawn numbers."""
    job = stopped(tmp_path, make_job, undisturbed, {place: "TERM"}, kind)
    assert job.steps_repeated == [0]
    if kind == "swallows" and place != "late":
        # The function catches the stop once, and its next poll raises it again.
        assert (job.directory / "swallowed").read_text() == "xx"


def test_a_stop_in_the_evaluation_at_the_end_changes_no_bit(tmp_path, make_job, undisturbed):
    """No step remains, but the evaluation does."""
    job = stopped(tmp_path, make_job, undisturbed, {"poll 1": "USR1"}, "remembers", code=75, at=20)
    assert job.history.attempts[1].start_step == 20


@pytest.mark.parametrize("step", [8, 19])
def test_a_stop_before_an_evaluation_leaves_it_to_the_next_start(
    step, tmp_path, make_job, undisturbed
):
    """The signal arrives in the last step before it, and the boundary stops before it evaluates."""
    job = make_job(
        tmp_path / "job", script=SCRIPT, kind="remembers", kill_at={f"step {step}": "TERM"}
    )
    job.run_to_end(143)
    assert job.history.attempts[1].start_step == step + 1
    assert_same_run(job, undisturbed(script=SCRIPT, kind="remembers"))


def test_a_kill_in_an_evaluation_changes_no_bit(tmp_path, make_job, undisturbed):
    """The job resumes from the last checkpoint, and repeats the evaluation."""
    policy = {"checkpoint": {"every_steps": 4}}
    job = stopped(
        tmp_path, make_job, undisturbed, {"poll 1": "KILL"}, "swaps", code=-9, policy=policy
    )
    assert job.history.attempts[1].start_step == 8


def test_an_error_in_an_evaluation_while_a_stop_is_pending_saves(tmp_path, make_job, undisturbed):
    """For example, the signal also killed a child: the snapshot of the boundary is still exact."""
    job = stopped(tmp_path, make_job, undisturbed, {"poll 1": "raise"}, "swaps")
    assert job.steps_repeated == [0]
    assert "raised RuntimeError after a stop was requested: a helper has died" in job.output


def test_where_nobody_polls_a_thread_saves_the_held_boundary(tmp_path, make_job, undisturbed):
    """An evaluation that takes longer than a stop is allowed to is killed, and nothing is lost."""
    policy = {"checkpoint": {"every_steps": 100}}
    spec = {"kind": "swaps", "policy": policy}
    job = make_job(tmp_path / "job", SCRIPT, places={"poll 1": "sleep"}, **spec)
    process = job.start()
    process.wait_for((job.directory / "ready").exists, "the evaluation")
    process.signal(signal.SIGTERM)
    process.wait_for((job.checkpoints / "step_9").is_dir, "the save")
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert job.run() == 0, job.output
    assert job.history.attempts[1].start_step == 9
    assert_same_run(job, undisturbed(script=SCRIPT, **spec))


def test_without_memory_for_a_copy_the_boundary_is_held_on_disk(tmp_path, make_job, undisturbed):
    """It is written before the evaluation, and replaced by the save after the evaluation."""
    policy = {"checkpoint": {"every_steps": 3}}
    spec = {"kind": "swaps", "policy": policy, "no_memory": True}
    job = stopped(tmp_path, make_job, undisturbed, {"poll 1": "KILL"}, code=-9, **spec)
    assert job.history.attempts[1].start_step == 9
    saves = [e for e in job.history.attempts[0].events if e["kind"] == "save"]
    assert [(e["step"], e["reason"]) for e in saves[:2]] == [(3, "held"), (3, "periodic")]
    assert manifest.read(job.checkpoints / "step_18").logged_at["held_out"] == 17


def test_a_boundary_is_not_held_where_a_copy_would_cost_more_than_a_tenth(a_run, monkeypatch):
    """Then a stop waits, and `check_stop` returns False, so that the evaluation is complete."""
    held, answers = [], []
    hold = Saver.hold
    monkeypatch.setattr(Saver, "hold", lambda *a, **kw: held.append(a[1]) or hold(*a, **kw))
    monkeypatch.setattr(snapshot_holder, "_COPIES", 1e9)  # never from the second time on
    monkeypatch.setattr(stopping, "leave", lambda code, text, reason: forge.Exit(code, text))

    def register(run):
        @run.every(2)
        def evaluate(step):
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(run.check_stop())
            assert run.is_stopping == (step == 4)
            run.log(held_out=1.0)

    with pytest.raises(forge.Exit, match="SIGTERM"):
        a_run(8, register)
    stopping.uninstall()  # the process would have ended
    assert held == [2]  # the first time, the duration is not known
    assert answers == [False, False]
    assert manifest.read(a_run.directory / "step_4").logged_at["held_out"] == 3


def test_a_stop_that_waited_long_for_its_step_names_run_every(a_run, monkeypatch, caplog):
    """The message has the waiting time, which is the cost of an evaluation inside the loop."""
    monkeypatch.setattr(shutdown, "_LONG_WAIT_S", 0.0)
    monkeypatch.setattr(stopping, "leave", lambda code, text, reason: forge.Exit(code, text))

    def loop(run, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            assert run.is_stopping

    with pytest.raises(forge.Exit, match="SIGTERM"):
        a_run(8, lambda run: None, loop)
    stopping.uninstall()
    assert "Step 2 ended 0 s after the stop was requested" in caplog.text
    assert "`run.every`" in caplog.text


def test_a_forced_exit_in_a_step_names_run_every(tmp_path, make_job):
    """For example an evaluation inside the loop that takes longer than a stop is allowed to."""
    policy = {"shutdown": {"timeout_s": 1.0}}
    job = make_job(tmp_path / "job", "stages.py", stage="c_call", policy=policy)
    process = job.start()
    process.wait_for((job.directory / "ready").exists, "the step")
    process.signal(signal.SIGTERM)
    assert process.wait() == 70
    assert "Step 2 had not ended 1 s after the stop was requested" in job.output
    assert "`run.every`" in job.output


@pytest.fixture
def stopped_at_4(a_run, monkeypatch):
    """Makes a checkpoint of step 4 without its evaluation: by a stop in it, or just before it."""
    monkeypatch.setattr(stopping, "leave", lambda code, text, reason: forge.Exit(code, text))

    def stop_once(at):
        def register(run):
            @run.every(4)
            def evaluate(step):
                if at == "in it":
                    os.kill(os.getpid(), signal.SIGTERM)
                run.check_stop()

        def loop(run, step):
            if at == "before it" and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(forge.Exit, match="SIGTERM"):
            a_run(6, register, loop)
        stopping.uninstall()  # the process would have ended

    return stop_once


@pytest.mark.parametrize("at", ["before it", "in it"])
def test_a_stop_costs_a_checkpoint_none_of_its_metrics(at, a_run, stopped_at_4):
    """The resumed job evaluates, and then makes the save that is due at that boundary."""
    stopped_at_4(at)

    def register(run):
        @run.every(4)
        def evaluate(step):
            run.log(evaluate=step)

    a_run(6, register)
    assert manifest.read(a_run.directory / "step_4").logged_at["evaluate"] == 3


@pytest.mark.parametrize("at", ["before it", "in it"])
def test_a_save_before_the_loop_leaves_a_held_boundary_as_it_is(at, a_run, stopped_at_4):
    """Before the loop, a save would not have the position in the data."""
    stopped_at_4(at)
    before = manifest.read(a_run.directory / "step_4")

    def register(run):
        run.save()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        a_run(6, register)
    assert manifest.read(a_run.directory / "step_4") == before


def test_a_rollback_to_a_boundary_that_was_held_on_disk_runs_its_functions_again(
    a_run, monkeypatch
):
    """The checkpoint was made before them, so their metrics and draws are not in it."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    seen, bad = [], []

    def loop(run, step):
        if step in (9, 10) and step not in bad:
            bad.append(step)
            run.should_step(math.nan)

    nan = {"action": "rollback", "max_consecutive": 2}
    checkpoint = {"dir": str(a_run.directory), "every_steps": None, "every_s": 1e6}
    a_run(12, lambda run: run.every(4)(seen.append), loop, nan=nan, checkpoint=checkpoint)
    assert bad == [9, 10]
    assert seen == [4, 8, 4, 8, 12]
