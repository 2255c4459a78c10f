"""`run.update` with a GradScaler: same bits as by hand, its own infs are no NaNs."""

import itertools

import pytest
import torch
from nan_trainer import assert_same_state, inf_gradient, streak, train
from updates import OPTIMIZERS, a_run, build, losses

import forge


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


def test_gradients_that_only_lie_there_do_not_hold_the_scale_back(tmp_path):
    """A GAN's generator leaves some at its critic, and the critic is updated several times."""
    results = []
    for is_ours in (False, True):
        (model, other), (optimizer, idle), _, scaler = two_models(16.0)
        stateful = {"model": model, "other": other, "optimizer": optimizer, "idle": idle}
        with a_run(tmp_path / str(is_ours), **stateful, scaler=scaler) as run:
            stream = losses(model, 30)
            for _ in run.steps(15) if is_ours else range(15):
                other[0].weight.grad = torch.ones_like(other[0].weight)
                for loss in itertools.islice(stream, 2):
                    scaler.scale(loss).backward()
                    if is_ours:
                        run.update(loss, optimizer, scaler=scaler)
                    else:
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
        results.append([model.state_dict(), scaler.state_dict()])
    assert results[0][1]["scale"] == 2.0**14, "it rose at every third of 30 updates"
    assert_same_state(*results)


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
                said.append(run.guard(loss))
                if said[-1]:
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        counted = run._nan.state_dict()["detector"]["total_nans"]
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


def test_gradients_that_stay_nan_count_once_the_scale_is_at_its_floor(tmp_path):
    """The scaler would halve for ever: below one, no scale is to blame."""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.nan

    with pytest.raises(forge.Exit) as caught:
        scaled_run(tmp_path, 40, lambda step, loss: Bad.apply(loss), init_scale=2.0**10)
    assert caught.value.code == 65
    assert "the gradient of model." in caught.value.reason


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
