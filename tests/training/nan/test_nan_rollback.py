"""`resilience.nan.action=rollback`: where it goes, what it skips, when it gives up, and resumes."""

import os
import signal

import pytest
import torch
from nan_trainer import (
    assert_close,
    assert_same_state,
    checkpoints,
    events,
    streak,
    train,
)

from forge.checkpoint.files import TensorsFile
from forge.config.schema import NanConfig, RollbackConfig
from forge.errors import DamagedCheckpoint
from forge.training.nan.nan_policy import NanPolicy
from forge.training.rollback import RateScale

ROLLBACK = {"action": "rollback", "max_consecutive": 2}


def damage(directory, step):
    (path,) = (directory / f"step_{step}").glob("tensors*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rollbacks(directory):
    return [(e["step"], e["first_bad"], e["from_step"]) for e in events(directory, "rollback")]


@pytest.fixture(autouse=True)
def _show_warnings(caplog):
    caplog.set_level("INFO", logger="forge")


# -- where to -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps_back", "every_steps", "expected"),
    [(0, 1, 9), (1, 1, 8), (4, 1, 5), (0, 4, 8), (1, 4, 8), (2, 4, 4), (9, 4, 0)],
)
def test_it_goes_to_the_newest_checkpoint_far_enough_before_the_first_bad_step(
    tmp_path, steps_back, every_steps, expected
):
    """The weights may have gone wrong some steps before the loss shows it."""
    nan = ROLLBACK | {"rollback": {"steps_back": steps_back}}
    outcome = train(tmp_path, bad=streak(9, 2), every_steps=every_steps, **nan)
    assert outcome.code == 0
    assert rollbacks(tmp_path) == [(expected, 9, 11)]
    assert outcome.steps == [*range(11), *range(expected, 16)]


def test_a_streak_shorter_than_max_consecutive_only_skips(tmp_path):
    outcome = train(tmp_path, action="rollback", max_consecutive=3, bad=streak(9, 2))
    assert (outcome.code, rollbacks(tmp_path)) == (0, [])
    assert outcome.updated.count(False) == 2


def test_a_damaged_newer_checkpoint_is_passed_over(tmp_path):
    """A rollback has to skip a checkpoint that cannot be read."""

    def damage_two(run):
        damage(tmp_path, 9)
        damage(tmp_path, 8)

    outcome = train(tmp_path, bad=streak(9, 2), at={10: damage_two}, **ROLLBACK)
    assert outcome.code == 0
    assert rollbacks(tmp_path) == [(7, 9, 11)]


@pytest.fixture
def _fails_half_way(monkeypatch):
    read = TensorsFile.read

    def fail(file, targets):
        was_verified = file.is_verified
        read(file, targets)
        if was_verified:
            targets[0].memory.fill_(7)
            raise DamagedCheckpoint("Input/output error")

    monkeypatch.setattr(TensorsFile, "read", fail)


@pytest.mark.usefixtures("_fails_half_way")
def test_a_checkpoint_that_cannot_be_read_to_its_end_ends_the_run(tmp_path):
    """Half of the checkpoint is in the live model, so training must not continue."""
    outcome = train(tmp_path, bad=streak(9, 2), **ROLLBACK)
    assert outcome.code == 74
    assert len(outcome.steps) == 11
    assert rollbacks(tmp_path) == []
    (event,) = events(tmp_path, "error")
    assert "training cannot continue" in event["text"]
    assert "step_11" not in checkpoints(tmp_path), "what is live must not be saved"


def test_nor_does_a_run_begin_from_such_a_one(tmp_path, request):
    """The disk can work again in the next attempt."""
    train(tmp_path, at={4: lambda run: os.kill(os.getpid(), signal.SIGTERM)}, **ROLLBACK)
    before = checkpoints(tmp_path)
    request.getfixturevalue("_fails_half_way")
    outcome = train(tmp_path, **ROLLBACK)
    assert (outcome.code, outcome.steps) == (74, [])
    assert checkpoints(tmp_path) == before


def test_checkpoints_of_the_abandoned_time_line_are_gone(tmp_path):
    """A resume must not use a checkpoint that was rolled back."""
    seen = []

    def look(run):
        seen.append((checkpoints(tmp_path), (tmp_path / "latest").resolve().name))

    nan = ROLLBACK | {"rollback": {"steps_back": 3}}
    train(tmp_path, bad=streak(9, 2), at={11: look}, **nan)
    assert seen == [({f"step_{n}" for n in range(7)}, "step_6")]


def test_a_save_that_is_asked_for_after_it_does_not_wait_for_an_earlier_one(tmp_path):
    """A save requested in a later step, before the rollback, does not count after it."""
    nan = ROLLBACK | {"rollback": {"steps_back": 9}}
    at = {8: lambda run: run.save(), 12: lambda run: run.save()}
    train(tmp_path, bad=streak(9, 2), at=at, every_steps=24, **nan)
    saves = [(e["step"], e["reason"]) for e in events(tmp_path, "save")]
    assert rollbacks(tmp_path) == [(0, 9, 11)]
    assert saves[:3] == [(0, "start"), (9, "requested"), (2, "requested")]


def test_an_end_that_was_asked_for_in_a_step_that_is_undone_is_forgotten(tmp_path):
    """A rollback cancels a `run.finish` that the loop called because of a NaN loss."""
    outcome = train(tmp_path, bad=streak(9, 2), at={10: lambda run: run.finish("NaN")}, **ROLLBACK)
    assert outcome.steps == [*range(11), *range(9, 16)]


def test_without_a_checkpoint_to_go_back_to_it_halts_and_says_so(tmp_path):
    nan = ROLLBACK | {"rollback": {"steps_back": 10}}
    outcome = train(tmp_path, bad=streak(9, 2), every_steps=4, **nan)
    assert outcome.code == 65
    assert "Step 9 is bad, but there is no good checkpoint" in outcome.text
    assert "step_8" in checkpoints(tmp_path)


def test_where_every_checkpoint_is_damaged_it_halts(tmp_path):
    outcome = train(
        tmp_path, bad=streak(2, 2), at={3: lambda run: damage_all(tmp_path)}, **ROLLBACK
    )
    assert outcome.code == 65
    assert "no good checkpoint" in outcome.text


def damage_all(directory):
    for name in checkpoints(directory):
        damage(directory, name.removeprefix("step_"))


def test_the_first_steps_can_be_rolled_back_too(tmp_path):
    """Before the first periodic save, the run rolls back to its start."""
    outcome = train(tmp_path, bad=streak(1, 2), every_steps=1000, **ROLLBACK)
    assert outcome.code == 0
    assert rollbacks(tmp_path) == [(0, 1, 3)]


def test_retention_keeps_a_checkpoint_from_before_the_streak(tmp_path):
    """With few checkpoints kept and a save at each step, the bad steps would push out the good."""
    nan = {"action": "rollback", "max_consecutive": 4, "rollback": {"steps_back": 2}}
    outcome = train(tmp_path, bad=streak(12, 4), keep_last=1, **nan)
    assert outcome.code == 0
    ((step, first_bad, from_step),) = rollbacks(tmp_path)
    assert (first_bad, from_step) == (12, 16)
    assert 0 < step <= 10


def test_the_weights_are_those_of_the_checkpoint(tmp_path):
    """Bit by bit: the run after the rollback is the run that never saw the streak."""
    rolled = train(tmp_path / "a", steps=9, bad=streak(7, 2), every_steps=4, **ROLLBACK)
    plain = train(tmp_path / "b", steps=4, every_steps=4, **ROLLBACK)
    first = next(e for e in events(tmp_path / "a", "rollback"))
    assert first["step"] == 4
    metrics = {}
    for name in ("a", "b"):
        metrics[name] = [e for e in events(tmp_path / name, "metrics") if e["step"] < 4]
    assert [e["values"] for e in metrics["a"]] == [e["values"] for e in metrics["b"]]
    assert rolled.code == plain.code == 0


def test_two_loops_in_one_run_do_not_roll_back_into_each_other(tmp_path):
    """A checkpoint of the first loop knows nothing of the second one's data."""
    import forge

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = {"nan": ROLLBACK, "checkpoint": {"dir": str(tmp_path), "every_steps": 5}}

    def loops():
        with forge.Run(policy, model=model, optimizer=optimizer) as run:
            for n, spoiled in ((5, ()), (10, (6, 7))):
                for step, x in run.steps(n, [torch.ones(1, 1)]):
                    loss = model(x).sum() * (torch.nan if step in spoiled else 1)
                    loss.backward()
                    run.update(loss, optimizer)

    with pytest.raises(forge.Exit) as caught:
        loops()
    assert caught.value.code == 65
    assert "no good checkpoint of this loop" in caught.value.text


# -- which data -----------------------------------------------------------------------------------


def test_skip_data_does_not_see_again_what_led_there(tmp_path):
    """The poison is in the data: seeing it again would end in the same place."""
    plain = train(tmp_path / "plain", action="skip", every_steps=None)
    nan = ROLLBACK | {"rollback": {"skip_data": True, "steps_back": 2}}
    rolled = train(tmp_path / "rolled", bad=streak(6, 2), **nan)
    assert rolled.steps == [*range(8), *range(4, 16)]
    # The epoch continues as if nothing had happened; only the batches 4 to 7 were seen in vain.
    assert rolled.batches[:10] == plain.batches[:10]


def test_without_skip_data_the_same_batches_come_again(tmp_path):
    nan = ROLLBACK | {"rollback": {"skip_data": False, "steps_back": 2}}
    rolled = train(tmp_path / "rolled", bad=streak(6, 2), **nan)
    plain = train(tmp_path / "plain", action="skip", every_steps=None)
    assert rolled.batches[8:] == plain.batches[4:]
    assert_same_state(rolled.state, plain.state)


def test_without_skip_data_a_rollback_crosses_the_epochs_border(tmp_path):
    """The order of an epoch that had ended has to come back with it."""
    nan = ROLLBACK | {"rollback": {"skip_data": False, "steps_back": 4}}
    rolled = train(tmp_path / "rolled", bad=streak(12, 2), **nan)
    plain = train(tmp_path / "plain", action="skip", every_steps=None)
    assert rolled.steps[14:] == list(range(8, 16))
    assert rolled.batches[14:] == plain.batches[8:]
    assert_same_state(rolled.state, plain.state)


def test_poisoned_samples_are_left_behind(tmp_path):
    """The bad batches of an epoch are passed by; all others are trained on."""
    order = [
        b for _, b in train(tmp_path / "order", action="skip", steps=10, every_steps=None).seen
    ]
    poison = {*order[5], *order[6]}
    outcome = train(
        tmp_path / "run", steps=8, bad=lambda v, s, indices: bool(poison & {*indices}), **ROLLBACK
    )
    assert outcome.code == 0
    assert rollbacks(tmp_path / "run") == [(5, 5, 7)]
    assert outcome.batches[7:10] == order[7:10]


# -- giving up ------------------------------------------------------------------------------------


def test_after_max_rollbacks_it_halts(tmp_path):
    nan = ROLLBACK | {"rollback": {"max_rollbacks": 2}}
    outcome = train(tmp_path, bad=lambda visit, step, indices: step in (6, 7), **nan)
    assert outcome.code == 65
    assert rollbacks(tmp_path) == [(6, 6, 8), (6, 6, 8)]
    assert "2 bad steps in a row, limit 2, and no rollback is left" in outcome.text
    assert (tmp_path / "latest").resolve().is_dir()


def test_zero_rollbacks_halts_at_the_first_streak(tmp_path):
    outcome = train(tmp_path, bad=streak(6, 2), **(ROLLBACK | {"rollback": {"max_rollbacks": 0}}))
    assert (outcome.code, rollbacks(tmp_path)) == (65, [])


def test_a_rollback_at_every_bad_step_is_possible(tmp_path):
    """max_consecutive=1: two rollbacks to the same step, one after the other."""
    nan = {"action": "rollback", "max_consecutive": 1}
    outcome = train(tmp_path, bad=streak(6, 2), **nan)
    assert outcome.code == 0
    assert rollbacks(tmp_path) == [(6, 6, 7), (6, 6, 7)]


# -- the rate -------------------------------------------------------------------------------------

SCHEDULES = {
    "none": None,
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=30),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [3],
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_the_rate_is_multiplied_whatever_the_schedule_sets(name, as_tensor):
    """Schedules overwrite the rate, each in its way; the scale has to act on what they set."""

    def rates(scale):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        rate = torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1
        optimizer = torch.optim.SGD([parameter], lr=rate)
        schedule = SCHEDULES[name](optimizer) if SCHEDULES[name] else None
        policy = NanPolicy(NanConfig(rollback=RollbackConfig(lr_scale=scale)))
        scaling = RateScale(policy, optimizer)
        found = []
        for step in range(8):
            if step == 4:
                policy.rolled_back()
            before = parameter.item()
            parameter.sum().backward()
            optimizer.step()
            if name == "ReduceLROnPlateau":
                schedule.step(1.0)
            elif schedule:
                schedule.step()
            optimizer.zero_grad()
            found.append(before - parameter.item())
        scaling.remove()
        return torch.tensor(found), optimizer.param_groups[0]["lr"]

    (plain, last), (scaled, last_scaled) = rates(1.0), rates(0.25)
    assert_close(scaled[:4], plain[:4])
    assert_close(scaled[4:], plain[4:] * 0.25)
    assert last == last_scaled, "what the optimizer shows and saves stays the schedule's"


def test_every_rollback_multiplies_again(tmp_path, caplog):
    nan = {"action": "rollback", "max_consecutive": 1, "rollback": {"lr_scale": 0.5}}
    train(tmp_path, bad=streak(6, 2), **nan)
    assert "learning rate is now 0.5 times" in caplog.text
    assert "learning rate is now 0.25 times" in caplog.text


def test_a_scale_is_taken_off_the_optimizer_when_the_run_ends(tmp_path):
    """The optimizer is the user's own."""
    kept = []

    def sgd(parameters):
        kept.append(torch.optim.SGD(parameters, lr=0.1))
        return kept[0]

    nan = {"action": "rollback", "max_consecutive": 1, "rollback": {"lr_scale": 0.5}}
    train(tmp_path, bad=streak(2, 1), optimizer=sgd, schedule=None, **nan)
    (optimizer,) = kept
    (before,) = (optimizer.param_groups[0]["params"][0].detach().clone(),)
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(before)
    optimizer.step()
    assert_close(optimizer.param_groups[0]["params"][0].detach(), before - 0.1)
