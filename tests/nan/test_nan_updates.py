"""`run.update` beside the loop one would write by hand: same bits, one look, right clipping."""

import contextlib
import itertools
import os
import signal

import pytest
import torch
from nan_trainer import assert_same_state, inf_gradient, streak, train

import forge
from forge import stopping

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def build(make_optimizer, depth=3, **options):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4, **options) for _ in range(depth)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 1, **options))
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
    return model, optimizer, schedule


def losses(model, steps):
    generator = torch.Generator().manual_seed(9)
    parameter = next(model.parameters())
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator).to(parameter.dtype)
        yield (model(x) - x.sum(1, keepdim=True)).square().mean()


@contextlib.contextmanager
def a_run(directory, policy=None, **stateful):
    """A run whose handlers are gone afterwards."""
    try:
        checkpoint = {"dir": str(directory), "every_steps": 1000, "every_s": None}
        with forge.Run({"checkpoint": checkpoint, **(policy or {})}, **stateful) as run:
            yield run
    finally:
        stopping.uninstall()
        stopping._state.is_leaving = False


# -- as by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("policy", [{}, {"enabled": False}], ids=["enabled", "disabled"])
def test_fifty_updates_give_the_very_bits_of_the_loop_written_by_hand(
    tmp_path, name, clip_norm, policy
):
    """Nobody would use a loop that trains something else."""
    by_hand, optimizer, schedule = build(OPTIMIZERS[name])
    for loss in losses(by_hand, 50):
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    ours, our_optimizer, our_schedule = build(OPTIMIZERS[name])
    stateful = {"model": ours, "optimizer": our_optimizer, "schedule": our_schedule}
    with a_run(tmp_path, policy, **stateful) as run:
        for _, loss in zip(run.steps(50), losses(ours, 50), strict=False):
            loss.backward()
            assert run.update(loss, our_optimizer, our_schedule, clip_norm=clip_norm)
    assert_same_state(ours.state_dict(), by_hand.state_dict())
    assert_same_state(our_optimizer.state_dict(), optimizer.state_dict())
    assert our_schedule.last_epoch == schedule.last_epoch


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


# -- huge, but finite -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 1e38), (torch.bfloat16, 1e30), (torch.float16, 6e4)],
)
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_huge_finite_gradients_are_no_nan_and_are_clipped_right(tmp_path, dtype, size, clip_norm):
    """Their squares overflow, they do not: plain clipping would make zeros of them."""
    weight = torch.nn.Parameter(torch.zeros(16, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with a_run(
        tmp_path, {"nan": {"action": "halt"}}, weight=_Holder(weight), optimizer=optimizer
    ) as run:
        for _ in run.steps(1):
            weight.grad = torch.full_like(weight, size)
            assert run.update(torch.tensor(1.0), optimizer, clip_norm=clip_norm)
    expected = size if clip_norm is None else clip_norm / 4
    torch.testing.assert_close(
        weight.detach().double(), torch.full((16,), -expected).double(), rtol=1e-2, atol=0
    )


class _Holder(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


# -- the scaler's own infs ------------------------------------------------------------------------


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


# -- host synchronisations ------------------------------------------------------------------------


@pytest.fixture
def syncs(monkeypatch):
    """Counts what would wait for a device: every way of bringing a tensor's value to the host."""
    counts = {}
    depth = itertools.count()
    inside = []

    def patch(name):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, **kwargs):
            if not inside:  # bool() may be implemented by item()
                counts[name] = counts.get(name, 0) + 1
                next(depth)
            inside.append(name)
            try:
                return original(self, *args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(torch.Tensor, name, counted)

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
        patch(name)
    return counts


@pytest.mark.parametrize("depth", [1, 40])
@pytest.mark.parametrize("check_gradients", [True, False])
@pytest.mark.parametrize("form", ["update", "update with clipping", "guard"])
def test_a_good_step_waits_for_the_device_at_most_once(
    tmp_path, syncs, depth, check_gradients, form
):
    """One look a step, however many parameters: each wait costs the device's idle time."""
    model, optimizer, schedule = build(OPTIMIZERS["AdamW fused"], depth)
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule}
    found = []
    with a_run(tmp_path, {"nan": {"check_gradients": check_gradients}}, **stateful) as run:
        for _, loss in zip(run.steps(8), losses(model, 8), strict=False):
            loss.backward()
            syncs.clear()
            if form == "guard":
                run.guard(loss)
            else:
                run.update(loss, optimizer, schedule, clip_norm=1.0 if "clip" in form else None)
            run.log(loss=loss)
            found.append(sum(syncs.values()))
            optimizer.zero_grad()
    assert found == [1] * 8


def test_the_counter_of_waits_counts(syncs):
    """Or the test above could not fail."""
    for wait in (torch.Tensor.item, torch.Tensor.tolist, float, bool, int):
        wait(torch.tensor(1.0))
    assert sum(syncs.values()) == 5


# -- several optimizers ---------------------------------------------------------------------------


def two_optimizer_run(directory, bad_one, policy, steps=8, each=lambda run, step: None):
    """A run with two updates a step; `bad_one` is the update whose loss is NaN in steps 2 to 5."""
    torch.manual_seed(0)
    models = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models)
    checkpoint = {"dir": str(directory), "every_steps": None, "every_s": None}
    try:
        with forge.Run(
            {"checkpoint": checkpoint, **policy}, models=models, first=first, second=second
        ) as run:
            for step in run.steps(steps):
                for number, optimizer in enumerate((first, second)):
                    loss = models[number](torch.randn(3, 2)).square().mean()
                    if number == bad_one and 2 <= step < 6:
                        loss = loss * torch.nan
                    loss.backward()
                    run.update(loss, optimizer)
                each(run, step)
            return 0, models.state_dict(), run._nan.state_dict()
    except forge.Exit as error:
        return int(error.code), models.state_dict(), error.reason
    finally:
        stopping.uninstall()
        stopping._state.is_leaving = False


@pytest.mark.parametrize("bad_one", [0, 1])
def test_a_step_with_two_updates_is_bad_if_one_of_them_is(tmp_path, bad_one):
    """A generator that is NaN for ever must not be excused by its discriminator."""
    code, _, reason = two_optimizer_run(tmp_path, bad_one, {"nan": {"max_consecutive": 4}})
    assert code == 65
    assert "Step 5" in reason
    assert "4 of 4 in a row" in reason


def test_a_step_with_two_updates_counts_once(tmp_path):
    code, _, state = two_optimizer_run(tmp_path, 1, {"nan": {"max_consecutive": 5}})
    assert code == 0
    assert state["detector"]["total_nans"] == 4
    assert state["detector"]["consecutive_nans"] == 0
    assert state["first_bad_step"] is None


def test_a_stop_after_two_updates_repeats_neither(tmp_path):
    """An evaluation that is interrupted is begun again; the updates before it were done."""

    def poll(run, step):
        run.poll()

    def stop_at_three(run, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        run.poll()

    _, undisturbed, _ = two_optimizer_run(tmp_path / "a", None, {}, each=poll)
    code, _, _ = two_optimizer_run(tmp_path / "b", None, {}, each=stop_at_three)
    assert code == 143
    assert (tmp_path / "b" / "step_3").is_dir(), "it stopped inside the step"
    code, resumed, _ = two_optimizer_run(tmp_path / "b", None, {}, each=poll)
    assert code == 0
    assert_same_state(resumed, undisturbed)


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["optimizer", "schedule", "scaler"])
def test_an_object_that_the_run_does_not_know_is_refused(tmp_path, name):
    """Its state would be lost at every stop, silently."""
    model, optimizer, schedule = build(OPTIMIZERS["SGD"])
    scaler = torch.amp.GradScaler("cpu")
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    del stateful[name]
    with a_run(tmp_path, **stateful) as run:
        for _, loss in zip(run.steps(1), losses(model, 1), strict=False):
            loss.backward()
            with pytest.raises(forge.ForgeError, match=rf"Run.update\({name}=…\).*{name}={name}"):
                run.update(loss, optimizer, schedule, scaler=scaler)


def test_what_one_update_cannot_step_is_refused_with_what_to_do(tmp_path):
    """Both need what `update` is not given: a metric, a closure."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    lbfgs = torch.optim.LBFGS([parameter])
    sgd = torch.optim.SGD([parameter], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    stateful = {"weight": _Holder(parameter), "lbfgs": lbfgs, "sgd": sgd, "plateau": plateau}
    with a_run(tmp_path, **stateful) as run:
        with pytest.raises(forge.errors.ForgeError, match=r"step\(closure\).*guard"):
            run.update(torch.tensor(1.0), lbfgs)
        with pytest.raises(forge.errors.ForgeError, match=r"schedule.step\(metric\)"):
            run.update(torch.tensor(1.0), sgd, plateau)
