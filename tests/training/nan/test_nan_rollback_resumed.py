"""Rollbacks, and streaks of bad steps, of runs that are interrupted and go on."""

import signal

import pytest
from harness import assert_same_run
from nan_trainer import (
    assert_same_state,
    checkpoints,
    events,
    kill,
    stop,
    streak,
    train,
)
from rows import each_value
from test_nan_rollback import rollbacks

ROLLBACK = {"action": "rollback", "max_consecutive": 2}


@pytest.fixture(autouse=True)
def _show_warnings(caplog):
    caplog.set_level("INFO", logger="forge")


SPEC = {
    "bad": lambda visit, step, indices: 3 in indices,  # in every epoch, by the data
    "every_steps": 3,
    "action": "rollback",
    "max_consecutive": 1,
    "rollback": {"max_rollbacks": 50, "lr_scale": 0.8},
}


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Makes what several rows of a test compare with: its directory, and the outcome."""
    made = {}

    def get(name, **spec):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = directory, train(directory, **spec)
        return made[name]

    return get


@pytest.mark.parametrize(("skip_data", "how"), each_value([True, False], [stop, kill]))
def test_a_run_with_rollbacks_ends_with_the_same_bits_however_it_is_interrupted(
    tmp_path, how, skip_data
):
    """The product's promise, with the NaN policy's own state in it."""
    spec = SPEC | {"rollback": SPEC["rollback"] | {"skip_data": skip_data}, "steps": 24}
    if not skip_data:
        spec |= {"bad": lambda visit, step, indices: False}
    undisturbed = train(tmp_path / "undisturbed", **spec)
    assert undisturbed.code == 0
    assert skip_data == bool(rollbacks(tmp_path / "undisturbed"))
    interrupted = tmp_path / "interrupted"
    codes = [train(interrupted, at={visit: how}, **spec).code for visit in (4, 5, 7, 3)]
    assert set(codes) == {143 if how is stop else -signal.SIGKILL}
    outcome = train(interrupted, **spec)
    assert outcome.code == 0
    assert_same_state(outcome.state, undisturbed.state)


@pytest.mark.parametrize(
    ("how", "visit"),
    [
        pytest.param(how, visit, marks=() if (3 * i + visit) % 6 in (2, 3) else pytest.mark.proofs)
        for i, how in enumerate([kill, stop])
        for visit in range(7, 13)
    ],
)
def test_an_interruption_around_a_rollback_changes_nothing(tmp_path, how, visit, once):
    """Before it, in it, and in the steps after it."""
    poison = {*once("order", action="skip", steps=10, every_steps=None)[1].batches[9]}
    spec = SPEC | {"bad": lambda v, s, indices: poison == {*indices}, "every_steps": 4}
    directory, undisturbed = once("undisturbed", **spec)
    assert rollbacks(directory)[0] == (8, 9, 10)
    assert train(tmp_path / "run", at={visit: how}, **spec).code in (143, -signal.SIGKILL)
    outcome = train(tmp_path / "run", **spec)
    assert outcome.code == 0
    assert_same_state(outcome.state, undisturbed.state)


def test_the_scale_and_the_budget_survive_a_stop(tmp_path):
    """A job that is preempted often must not get new rollbacks for nothing."""
    spec = {
        "bad": lambda visit, step, indices: step in (6, 12),
        "action": "rollback",
        "max_consecutive": 1,
        "rollback": {"max_rollbacks": 3, "lr_scale": 0.5},
        "steps": 20,
    }
    undisturbed = train(tmp_path / "undisturbed", **spec)
    assert (undisturbed.code, len(rollbacks(tmp_path / "undisturbed"))) == (65, 3)

    def once(step):
        seen = set()

        def bad(visit, current, indices):
            is_bad = current == step and not seen
            seen.update([current] if is_bad else [])
            return is_bad

        return bad

    spec["bad"] = once(6)
    assert train(tmp_path / "run", at={9: stop}, **spec).code == 143
    spec["bad"] = once(12)
    assert train(tmp_path / "run", at={6: stop}, **spec).code == 143
    spec["bad"] = lambda visit, step, indices: step == 18
    assert train(tmp_path / "run", **spec).code == 65
    assert len(rollbacks(tmp_path / "run")) == 3


@pytest.mark.parametrize(("action", "how"), each_value(["skip", "rollback"], [stop, kill]))
def test_a_streak_survives_a_resume(tmp_path, how, action):
    """Stopped in the middle of it: three in a row are three in a row."""
    spec = {"action": action, "max_consecutive": 4, "bad": lambda v, step, i: 6 <= step < 10}
    spec["rollback"] = {"max_rollbacks": 0}
    first = train(tmp_path, at={7: how}, **spec)
    assert first.code in (143, -signal.SIGKILL)
    second = train(tmp_path, **spec)
    assert second.code == 65
    assert second.steps[-1] == 9
    assert "4 bad steps in a row, limit 4" in second.text


def test_a_streak_delays_neither_a_stop_nor_a_save(tmp_path):
    """The state is good, because bad updates are skipped; the time that is left is short."""
    outcome = train(tmp_path, action="skip", max_consecutive=9, bad=streak(5, 6), at={7: stop})
    assert outcome.code == 143
    assert outcome.steps == list(range(8))
    assert {"step_6", "step_7", "step_8"} <= checkpoints(tmp_path)


def test_a_save_asked_for_in_a_streak_is_done(tmp_path):
    outcome = train(
        tmp_path,
        action="skip",
        every_steps=1000,
        bad=streak(5, 3),
        at={6: lambda run: run.save()},
    )
    assert outcome.code == 0
    assert [e["step"] for e in events(tmp_path, "save") if e["reason"] == "requested"] == [7]


@pytest.mark.slow
def test_a_true_job_with_a_streak_is_killed_and_goes_on_exactly(tmp_path, make_job, undisturbed):
    """The same with a true process and a true SIGKILL in the middle of a streak."""
    policy = {"nan": {"action": "skip", "max_consecutive": 4}, "checkpoint": {"every_steps": 3}}
    spec = {"steps": 14, "bad_steps": [5, 6, 7], "policy": policy}
    job = make_job(tmp_path / "job", **spec, kill_at={"6": "KILL"})
    job.run_to_end(-signal.SIGKILL)
    assert_same_run(job, undisturbed(**spec))
