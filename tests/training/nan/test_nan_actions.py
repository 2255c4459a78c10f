"""The actions of `resilience.nan.action`, in whole runs."""

import json
import math
import re

import pytest
import torch
from forked import ForkedJob
from nan_trainer import (
    assert_same_state,
    checkpoints,
    events,
    inf_gradient,
    nan_gradient,
    streak,
    train,
)

import forge


@pytest.fixture(autouse=True)
def _show_warnings(caplog):
    caplog.set_level("INFO", logger="forge")


# -- whole jobs -----------------------------------------------------------------------------------


def nan_job(tmp_path, action, *bad_steps, **nan):
    policy = {"nan": {"action": action, **nan}, "checkpoint": {"every_steps": 4, "every_s": None}}
    return ForkedJob(tmp_path / "job", steps=14, bad_steps=list(bad_steps), policy=policy)


def is_finite(job):
    return all(bool(t.isfinite().all()) for t in job.weights.values() if t.is_floating_point())


def test_a_job_that_warns_goes_on_with_the_update(tmp_path):
    """A user wants to see the effect of a NaN; a line for each step would fill the disk."""
    job = nan_job(tmp_path, "warn", 5)
    assert job.run() == 0
    assert "NaN or Inf in step 5: the loss is nan; the update was applied" in job.output
    told = re.findall(r"NaN or Inf in step (\d+): .*; bad steps so far: (\d+)\n", job.output)
    assert told == [("5", "1"), ("6", "2"), ("8", "4"), ("12", "8")]
    assert not is_finite(job)


def test_a_job_that_skips_finishes_with_finite_weights(tmp_path):
    job = nan_job(tmp_path, "skip", 5, 6, 9)
    assert job.run() == 0
    told = "the loss is nan; this update is skipped"
    assert f"NaN or Inf in step 5: {told} (1 bad step in a row, limit 5)" in job.output
    assert f"NaN or Inf in step 6: {told} (2 bad steps in a row, limit 5)" in job.output
    assert f"NaN or Inf in step 9: {told} (1 bad step in a row, limit 5)" in job.output
    assert is_finite(job)


@pytest.mark.parametrize("action", ["halt", "raise"])
def test_a_job_that_halts_ends_with_65_and_its_last_good_checkpoint(tmp_path, action):
    """Exit code 65 shows the launcher that a restart would not help."""
    job = nan_job(tmp_path, action, 5)
    assert job.run() == 65
    assert "halted by the NaN policy. NaN or Inf in step 5: the loss is nan" in job.output
    assert (job.checkpoints / "latest").resolve().name == "step_4"
    verdict = json.loads((job.checkpoints / ".forge" / "verdict.json").read_text())
    assert verdict["exit_code"] == 65
    assert verdict["reason"] == "halted"
    assert "in step 5:" in verdict["text"]
    assert not (job.directory / "weights.pt").exists()


def test_a_job_whose_rollbacks_do_not_help_halts_with_65(tmp_path):
    """If steps are bad with any data, endless rollbacks would use up the allocation."""
    job = nan_job(tmp_path, "rollback", 6, 7, max_consecutive=2, rollback={"max_rollbacks": 2})
    assert job.run() == 65
    rollbacks = [e for a in job.history.attempts for e in a.events if e["kind"] == "rollback"]
    assert [(e["step"], e["first_bad"], e["from_step"]) for e in rollbacks] == [(4, 6, 8)] * 2
    assert "no rollback is left (`resilience.nan.rollback.max_rollbacks=2`)" in job.output
    assert (job.checkpoints / "latest").resolve().name == "step_4"


# -- skip -----------------------------------------------------------------------------------------


def test_a_skipped_update_moves_nothing(tmp_path):
    """Weights, the optimizer's averages and counters, and the schedule keep the same bits."""
    states = []

    def keep(run):
        states.append(
            {
                k: torch.clone(v) if isinstance(v, torch.Tensor) else v
                for k, v in snapshot(run).items()
            }
        )

    def snapshot(run):
        live = run._live.capture()["states"]
        flat = {f"model.{k}": v for k, v in live["model"].items()}
        for number, one in live["optimizer"]["state"].items():
            flat |= {f"optimizer.{number}.{k}": v for k, v in one.items()}
        flat["rate"] = live["optimizer"]["param_groups"][0]["lr"]
        flat["epoch"] = live["schedule"]["last_epoch"]
        return flat

    outcome = train(
        tmp_path, action="skip", steps=9, bad=streak(5, 2), at=dict.fromkeys(range(9), keep)
    )
    assert outcome.updated == [True] * 5 + [False] * 2 + [True] * 2
    assert_same_state(states[4], states[5])
    assert_same_state(states[4], states[6])
    assert states[7]["epoch"] == states[4]["epoch"] + 1
    assert not torch.equal(states[7]["model.0.weight"], states[4]["model.0.weight"])


@pytest.mark.parametrize("form", ["update", "guard"])
def test_a_streak_of_max_consecutive_halts_where_it_ends(tmp_path, form):
    """The data or the model is broken, so more skips would only waste the allocation."""
    outcome = train(tmp_path, action="skip", max_consecutive=3, bad=streak(6, 3), form=form)
    assert outcome.code == 65
    assert "in step 8:" in outcome.text
    assert "3 bad steps in a row, limit 3 (`resilience.nan.max_consecutive`)" in outcome.text
    assert outcome.steps == list(range(9))
    assert "step_8" in checkpoints(tmp_path)
    assert (tmp_path / "latest").resolve().is_dir()


def test_a_good_step_ends_the_streak(tmp_path):
    """Two bad steps of every three are never three in a row."""
    spec = {"steps": 12, "max_consecutive": 3, "bad": lambda v, s, i: v % 3 != 0}
    outcome = train(tmp_path, action="skip", **spec)
    assert outcome.code == 0
    assert outcome.updated.count(False) == 8


def test_a_bad_last_step_still_halts(tmp_path):
    """The run must not count as finished."""
    outcome = train(tmp_path, action="halt", steps=6, bad=streak(5, 1))
    assert outcome.code == 65
    assert not events(tmp_path, "finish")


def test_a_bad_step_that_ends_the_loop_by_break_still_halts(tmp_path):
    """After it there is no boundary, only the end of the `with` block."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {"nan": {"action": "halt"}, "checkpoint": {"dir": str(tmp_path)}}

    def train_and_break():
        with forge.Run(policy, model=model, optimizer=optimizer) as run:
            for _ in run.steps(5):
                loss = model(torch.full((1, 2), torch.nan)).sum()
                loss.backward()
                run.update(loss, optimizer)
                break

    with pytest.raises(forge.Exit) as caught:
        train_and_break()
    assert caught.value.code == 65


# -- halt -----------------------------------------------------------------------------------------


def test_halt_leaves_the_weights_of_the_step_before(tmp_path):
    halted = train(tmp_path / "a", action="halt", bad=streak(7, 1))
    until_then = train(tmp_path / "b", action="halt", steps=7)
    assert halted.code == 65
    assert_same_state(halted.state, until_then.state)
    assert (tmp_path / "a" / "latest").resolve().name == "step_7"


def test_a_halted_run_that_is_started_again_goes_on_from_its_last_good_step(tmp_path):
    """The fault was temporary, or a user has repaired the data."""
    assert train(tmp_path / "a", action="halt", bad=streak(7, 1)).code == 65
    again = train(tmp_path / "a", action="halt")
    assert again.code == 0
    assert again.steps[0] == 7
    assert_same_state(again.state, train(tmp_path / "b", action="halt").state)


def test_the_metrics_up_to_the_halt_are_in_the_ledger(tmp_path):
    """Users want to see the losses just before the NaN."""
    train(tmp_path, action="halt", bad=streak(7, 1), every_steps=1000)
    assert [e["step"] for e in events(tmp_path, "metrics")] == list(range(8))


# -- which steps are bad ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["update", "guard"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (nan_gradient, "the gradient of model.2.weight (8 NaN, 0 Inf of 8)"),
        (inf_gradient, "the gradient of model.0.bias ("),
        (lambda model, loss: loss * torch.nan, "the loss is nan"),
        (lambda model, loss: loss + torch.inf, "the loss is inf"),
        (lambda model, loss: loss - torch.inf, "the loss is -inf"),
    ],
    ids=["nan gradient", "inf gradient", "nan loss", "inf loss", "minus inf loss"],
)
def test_the_culprit_is_named(tmp_path, caplog, spoil, words, form):
    """Users first want to know which parameter went wrong."""
    outcome = train(tmp_path, action="skip", steps=6, bad=streak(3, 1), spoil=spoil, form=form)
    assert outcome.updated == [True] * 3 + [False] + [True] * 2
    assert f"NaN or Inf in step 3: {words}" in caplog.text
    assert all(bool(t.isfinite().all()) for t in outcome.state["model"].values())


def test_many_culprits_are_counted(tmp_path, caplog):
    train(tmp_path, action="skip", steps=3, bad=streak(1, 1), spoil=_all_gradients_nan)
    assert "model.0.weight (24 NaN, 0 Inf of 24)" in caplog.text
    assert "and 1 more" in caplog.text


def _all_gradients_nan(model, loss):
    return loss + sum((p * 0).sum().sqrt() for p in model.parameters())


def test_without_check_gradients_only_the_loss_is_judged(tmp_path):
    outcome = train(
        tmp_path,
        action="halt",
        check_gradients=False,
        steps=4,
        bad=streak(2, 1),
        spoil=nan_gradient,
    )
    assert outcome.code == 65, "the step after has a NaN loss, from the weights that it brought"
    assert outcome.steps == [0, 1, 2, 3]
    assert "in step 3:" in outcome.text


@pytest.mark.parametrize("form", ["update", "guard"])
@pytest.mark.parametrize(
    ("action", "updated", "code"),
    [
        ("warn", [True] * 6, 0),
        ("skip", [True, True, False, True, True, True], 0),
        ("halt", [True, True, False], 65),
        ("rollback", [True, True, False, True, True, True, True], 0),
    ],
)
def test_both_forms_of_the_update_follow_the_policy(tmp_path, form, action, updated, code):
    """`guard` is for users who write the update themselves."""
    more = {"max_consecutive": 1} if action == "rollback" else {}
    bad = streak(2, 1)
    outcome = train(tmp_path, action=action, steps=6, bad=bad, form=form, **more)
    assert (outcome.code, outcome.updated) == (code, updated)
    finite = all(bool(t.isfinite().all()) for t in outcome.state["model"].values())
    assert finite == (action != "warn")


def test_a_huge_loss_that_is_no_tensor_is_finite(tmp_path):
    """A python float has more range than a float32."""
    from forge.config.schema import NanConfig
    from forge.training.nan.nan_policy import NanPolicy

    checked = NanPolicy(NanConfig()).check(1e300, [], {})
    assert checked.problem == ""
    assert NanPolicy(NanConfig()).check(math.nan, [], {}).problem == "the loss is nan"
