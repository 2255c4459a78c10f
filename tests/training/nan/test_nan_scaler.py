"""`run.update` with a GradScaler: same bits as by hand, its own infs are no NaNs."""

import random

import pytest
import torch
from nan_trainer import assert_same_state, events, inf_gradient, stop, streak, train
from rows import each_value
from updates import OPTIMIZERS, a_run, build, losses

import forge
from forge.config.schema import Policy
from forge.errors import ForgeError
from forge.state.registry import StateRegistry
from forge.training.nan.nan_policy import NanPolicy
from forge.training.nan.update import Updater


def test_a_scaler_gives_the_very_bits_of_the_loop_written_by_hand(tmp_path):
    """Overflows of its own included: the scale starts far too high."""

    def scaled(model):
        return torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)

    by_hand, optimizer, schedule = build(OPTIMIZERS["SGD"])
    scaler = scaled(by_hand)
    for loss in losses(by_hand, 60):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
    ours, our_optimizer, our_schedule = build(OPTIMIZERS["SGD"])
    our_scaler = scaled(ours)
    stateful = {"model": ours, "optimizer": our_optimizer, "schedule": our_schedule}
    with a_run(tmp_path, **stateful, scaler=our_scaler) as run:
        for _, loss in zip(run.steps(60), losses(ours, 60), strict=False):
            our_scaler.scale(loss).backward()
            run.update(loss, our_optimizer, our_schedule, scaler=our_scaler, clip_norm=0.5)
    assert 0 < schedule.last_epoch < 60, "there were overflows, and steps after them"
    assert our_schedule.last_epoch == schedule.last_epoch
    assert_same_state(our_scaler.state_dict(), scaler.state_dict())
    assert_same_state(ours.state_dict(), by_hand.state_dict())


def two_models(init_scale):
    pairs = [build(OPTIMIZERS["SGD"]) for _ in range(2)]
    models, optimizers, schedules = ([pair[i] for pair in pairs] for i in range(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    return models, optimizers, schedules, scaler


@pytest.mark.parametrize("policy", [{}, {"enabled": False}], ids=["enabled", "disabled"])
def test_a_scaler_of_two_optimizers_moves_when_both_have_used_its_gradients(tmp_path, policy):
    """torch's recipe for several optimizers: both backward calls, both steps, one update."""
    models, optimizers, schedules, scaler = two_models(2.0**127)
    for pair in zip(*(losses(model, 40) for model in models), strict=True):
        for loss in pair:
            scaler.scale(loss).backward()
        before = scaler.get_scale()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.zero_grad()
            if scaler.get_scale() >= before:
                schedule.step()
    ours, our_optimizers, our_schedules, our_scaler = two_models(2.0**127)
    objects = {"a": ours[0], "b": ours[1], "oa": our_optimizers[0], "ob": our_optimizers[1]}
    objects |= {"sa": our_schedules[0], "sb": our_schedules[1], "scaler": our_scaler}
    pairs = zip(*(losses(model, 40) for model in ours), strict=True)
    with a_run(tmp_path, policy, **objects) as run:
        for _, pair in zip(run.steps(40), pairs, strict=False):
            for loss in pair:
                our_scaler.scale(loss).backward()
            for loss, optimizer, schedule in zip(pair, our_optimizers, our_schedules, strict=True):
                run.update(loss, optimizer, schedule, scaler=our_scaler)
    assert 0 < schedules[0].last_epoch < 40, "there were overflows, and steps after them"
    assert_same_state(our_scaler.state_dict(), scaler.state_dict())
    for one, other in zip((*ours, *our_schedules), (*models, *schedules), strict=True):
        assert_same_state(one.state_dict(), other.state_dict())


def test_an_optimizer_that_is_updated_twice_in_a_step_is_refused(tmp_path):
    """A GAN's critic; its generator can have left gradients of the old scale."""
    (model, _), (optimizer, _), (schedule, _), scaler = two_models(16.0)
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    with a_run(tmp_path, **stateful) as run:
        for _, loss in zip(run.steps(1), losses(model, 1), strict=True):
            scaler.scale(loss).backward()
            run.update(loss, optimizer, scaler=scaler)
            with pytest.raises(ForgeError, match="called twice in a step for `optimizer`"):
                run.update(loss, optimizer, scaler=scaler)


def test_three_optimizers_of_one_scaler_move_it_once_as_the_step_ends(tmp_path):
    """Whichever of them is updated last, and whoever computes its gradient after another's step."""
    pairs = [build(OPTIMIZERS["SGD"])[:2] for _ in range(3)]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    objects = {f"m{i}": pair[0] for i, pair in enumerate(pairs)}
    objects |= {f"o{i}": pair[1] for i, pair in enumerate(pairs)}
    scales = []
    with a_run(tmp_path, **objects, scaler=scaler) as run:
        for step in run.steps(3):
            scales.append(scaler.get_scale())
            for model, optimizer in pairs[step:] + pairs[:step]:
                loss = next(losses(model, 1))
                scaler.scale(loss).backward()
                run.update(loss, optimizer, scaler=scaler)
                assert scaler.get_scale() == scales[-1]
    assert scales == [16.0, 32.0, 64.0]
    assert scaler.get_scale() == 128.0


# -- its own infs ---------------------------------------------------------------------------------


def scaled_run(directory, steps, spoil=lambda _, loss: loss, form="update", init_scale=2.0**127):
    """A run with a scaler: answers, schedule, NaNs, model, scaler."""
    model, optimizer, schedule = build(lambda p: torch.optim.SGD(p, lr=1e-4))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    said = []
    with a_run(directory, {"nan": {"max_consecutive": 3}}, **stateful) as run:
        for step, loss in zip(run.steps(steps), losses(model, steps), strict=False):
            loss = spoil(step, loss * 100)
            scaler.scale(loss).backward()
            if form == "update":
                said.append(run.update(loss, optimizer, schedule, scaler=scaler))
            else:
                scaler.unscale_(optimizer)
                said.append(run.should_step(loss))
                if said[-1]:
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        counted = run._attempt.updater.state_dict()["nan"]["detector"]["total_nans"]
    return said, schedule, counted, model, scaler


@pytest.mark.parametrize("form", ["update", "guard"])
def test_a_scalers_own_overflow_is_no_nan(tmp_path, form):
    """It starts too high by design, and comes down by itself."""
    said, schedule, counted, model, scaler = scaled_run(tmp_path, 30, form=form)
    assert counted == 0
    assert scaler.get_scale() < 2.0**127
    if form == "update":
        assert said[0] is False
        assert said[-1] is True
        assert said.count(False) > 3
        assert schedule.last_epoch == said.count(True)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_an_infinite_scale_cannot_hide_a_nan_loss(tmp_path):
    """The loss is judged before it is scaled."""
    spoil = lambda step, loss: loss * torch.nan if step in (4, 5) else loss  # noqa: E731
    said, schedule, counted, model, _ = scaled_run(tmp_path, 12, spoil, init_scale=4.0)
    assert counted == 2
    assert said == [True] * 4 + [False] * 2 + [True] * 6
    assert schedule.last_epoch == 10
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


def bad_from(first):
    return lambda step, loss: _BadGradient.apply(loss) if step >= first else loss


@pytest.mark.parametrize("form", ["update", "guard"])
@pytest.mark.parametrize(
    ("first", "num_overflows", "words"),
    [
        (3, 5, "has fallen from 65536 to 2048 since the last good update"),
        (0, 17, "has fallen from 65536 to 0.5 without a good update"),
    ],
)
def test_gradients_that_stay_bad_are_nans_once_the_scale_explains_them_no_more(
    tmp_path, form, first, num_overflows, words
):
    """From 65536 they were taken for overflows for 17 steps, and no streak saw them."""
    with pytest.raises(forge.Exit) as caught:
        scaled_run(tmp_path, 40, bad_from(first), form, init_scale=2.0**16)
    assert caught.value.code == 65
    assert "the gradient of model." in caught.value.text
    last = num_overflows + first
    assert [e["step"] for e in events(tmp_path, "overflow")] == list(range(first, last))
    assert [e["total"] for e in events(tmp_path, "overflow")][-1] == num_overflows
    nans = events(tmp_path, "nan")
    assert [(e["step"], e["total"]) for e in nans] == [(last + i, 1 + i) for i in range(3)]
    assert words in nans[0]["problem"]


def test_a_scale_that_is_held_from_below_excuses_nothing(tmp_path):
    """Many loops keep it above a floor: there it would never fall, and NaNs never count."""

    class Floored(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(new_scale)
            super().update(max(self.get_scale(), 8.0))

    scaler = Floored("cpu", init_scale=16.0)
    bad = lambda visit, step, indices: visit >= 2  # noqa: E731
    outcome = train(tmp_path, max_consecutive=2, bad=bad, spoil=inf_gradient, scaler=scaler)
    assert (outcome.code, outcome.steps[-1]) == (65, 5)
    assert [e["step"] for e in events(tmp_path, "overflow")] == [2, 3]
    assert "scale stays at 8" in outcome.text


def test_a_good_optimizer_does_not_excuse_a_bad_one_that_shares_its_scaler(tmp_path):
    """A critic that learns nothing beside a generator that does."""
    models, optimizers, schedules, scaler = two_models(2.0**16)
    objects = {"a": models[0], "b": models[1], "oa": optimizers[0], "ob": optimizers[1]}
    objects |= {"sa": schedules[0], "sb": schedules[1]}
    pairs = zip(*(losses(model, 40) for model in models), strict=True)

    def run_all():
        with a_run(tmp_path, {"nan": {"max_consecutive": 3}}, **objects, scaler=scaler) as run:
            for step, (good, bad) in zip(run.steps(40), pairs, strict=False):
                scaler.scale(good).backward()
                scaler.scale(bad_from(3)(step, bad)).backward()
                run.update(good, optimizers[0], scaler=scaler)
                run.update(bad, optimizers[1], scaler=scaler)

    with pytest.raises(forge.Exit) as caught:
        run_all()
    assert caught.value.code == 65
    assert "the gradient of b." in caught.value.text
    # One more than four halvings: after step 2 the scale has grown.
    assert [e["step"] for e in events(tmp_path, "overflow")] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("stop_at", "action"), each_value([3, 8], ["skip", "rollback"]))
def test_a_resume_judges_bad_gradients_as_the_run_would_have(tmp_path, action, stop_at):
    """How far the scale has fallen is part of the state, through stops and rollbacks."""

    def run(directory, first=0, at=None):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        return train(
            directory,
            action=action,
            max_consecutive=2,
            rollback={"skip_data": False},
            bad=lambda visit, step, indices: 3 <= first + visit < 12,
            spoil=inf_gradient,
            scaler=scaler,
            steps=20,
            at=at,
        ), scaler.state_dict()

    whole, scale = run(tmp_path / "whole")
    assert run(tmp_path / "cut", at={stop_at: stop})[0].code == 143
    resumed, resumed_scale = run(tmp_path / "cut", first=stop_at + 1)
    assert (resumed.code, resumed.steps[-1]) == (whole.code, whole.steps[-1])
    assert_same_state(resumed.state, whole.state)
    assert resumed_scale == scale
    for kind in ("overflow", "nan"):
        seen = [
            [(e["step"], e["total"]) for e in events(tmp_path / where, kind)]
            for where in ("whole", "cut")
        ]
        assert seen[0] == seen[1]
        assert seen[0]


@pytest.mark.slow
def test_a_scaler_that_probes_its_scale_for_4000_healthy_steps_has_no_nan():
    """Losses grow and shrink, and now and then one batch is far from the others."""
    generator = random.Random(4)
    live = StateRegistry({})
    policy = NanPolicy(Policy().nan)
    updater = Updater(live, policy, is_enabled=True)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=20)
    live.objects.update(optimizer=optimizer, scaler=scaler)
    loss, drift = torch.tensor(1.0), 0.0
    for _ in range(4_000):
        drift = min(max(drift + generator.gauss(0, 0.1), -6), 6)
        size = 2.0 ** (drift + abs(generator.gauss(0, 1)))
        is_overflow = float(scaler.scale(loss)) * size > 65504  # the largest float16
        weight.grad = torch.full((1,), torch.inf if is_overflow else 1.0)
        updater.update(loss, optimizer, None, scaler, None)
        updater.settle()
    assert policy.total == 0
    assert updater.state_dict()["overflows"]["total"] > 60


def test_an_overflow_in_a_streak_neither_ends_nor_lengthens_it(tmp_path):
    """Three NaN losses with an overflow between them are three in a row."""

    def bad(visit, step, indices):
        return visit in (3, 4, 5, 6)

    def spoil(model, loss):
        spoil.count += 1
        return inf_gradient(model, loss) if spoil.count == 2 else loss * torch.nan

    spoil.count = 0
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    outcome = train(tmp_path, action="skip", max_consecutive=3, bad=bad, spoil=spoil, scaler=scaler)
    assert outcome.code == 65
    assert outcome.steps[-1] == 6


def test_a_disabled_scaler_is_as_none(tmp_path):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    outcome = train(tmp_path / "a", action="skip", bad=streak(3, 1), scaler=scaler, steps=8)
    assert_same_state(
        outcome.state, train(tmp_path / "b", action="skip", bad=streak(3, 1), steps=8).state
    )
