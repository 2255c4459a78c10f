"""`run.update` and a loop written by hand: same bits, one device sync, correct clipping."""

import itertools

import pytest
import torch
from nan_trainer import assert_close, assert_same_state
from rows import each_value
from updates import OPTIMIZERS, a_run, build, losses

import forge
from forge.shutdown import stopping
from forge.training import metrics


@pytest.mark.parametrize(
    ("name", "clip_norm", "policy"),
    each_value([*OPTIMIZERS], [None, 0.5], [{}, {"enabled": False}], num_rows=6),
)
def test_fifty_updates_give_the_very_bits_of_the_loop_written_by_hand(
    tmp_path, name, clip_norm, policy
):
    """`run.update` must not train something else."""
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


def deep(depth=24):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4) for _ in range(depth)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 1))


def in_two_groups(model):
    """As minGPT and nanoGPT: weights decay, biases do not."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], 0.01)


def test_clipping_sums_the_gradients_in_the_order_of_the_module(tmp_path):
    """The order of the optimizer's groups gives other last bits than torch's own line."""
    by_hand, ours = deep(), deep()
    optimizer = in_two_groups(by_hand)
    for loss in losses(by_hand, 100):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    optimizer = in_two_groups(ours)
    with a_run(tmp_path, model=ours, optimizer=optimizer) as run:
        for _, loss in zip(run.steps(100), losses(ours, 100), strict=False):
            loss.backward()
            run.update(loss, optimizer, clip_norm=0.01)
    assert_same_state(ours.state_dict(), by_hand.state_dict())


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e20), (torch.float32, 1e38), (torch.bfloat16, 1e30), (torch.float16, 6e4)],
)
@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_huge_finite_gradients_are_no_nan_and_are_clipped_right(tmp_path, dtype, size, clip_norm):
    """Their squares overflow although they are finite: plain clipping would make them zeros."""
    weight = torch.nn.Parameter(torch.zeros(16, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with a_run(
        tmp_path, {"nan": {"action": "halt"}}, weight=_Holder(weight), optimizer=optimizer
    ) as run:
        for _ in run.steps(1):
            weight.grad = torch.full_like(weight, size)
            assert run.update(torch.tensor(1.0), optimizer, clip_norm=clip_norm)
    expected = size if clip_norm is None else clip_norm / 4
    assert_close(weight.detach().double(), torch.full((16,), -expected).double(), rtol=1e-2, atol=0)


class _Holder(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


# -- host synchronisations ------------------------------------------------------------------------


@pytest.fixture
def syncs(monkeypatch):
    """Counts device synchronizations: all methods that bring a tensor's value to the host."""
    counts = {}
    depth = itertools.count()
    inside = []

    def patch(name):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, **kwargs):
            if not inside:  # bool() can call item()
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


@pytest.mark.parametrize(
    ("form", "check_gradients", "depth"),
    each_value(["update", "update with clipping", "guard"], [True, False], [1, 40], num_rows=6),
)
def test_a_good_step_waits_for_the_device_at_most_once(
    tmp_path, monkeypatch, syncs, depth, check_gradients, form
):
    """One sync a step for any number of parameters, since the device is idle during each."""
    monkeypatch.setattr(metrics, "is_on_host", lambda value: False)
    model, optimizer, schedule = build(OPTIMIZERS["AdamW fused"], depth)
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule}
    found = []
    with a_run(tmp_path, {"nan": {"check_gradients": check_gradients}}, **stateful) as run:
        for _, loss in zip(run.steps(8), losses(model, 8), strict=False):
            loss.backward()
            syncs.clear()
            if form == "guard":
                run.should_step(loss)
            else:
                run.update(loss, optimizer, schedule, clip_norm=1.0 if "clip" in form else None)
            run.log(loss=loss)
            found.append(sum(syncs.values()))
            optimizer.zero_grad()
    assert found == [1] * 8


def test_the_counter_of_waits_counts(syncs):
    """Otherwise the test above could not fail."""
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
            return 0, models.state_dict(), run._attempt.updater.state_dict()["nan"]
    except forge.Exit as error:
        return int(error.code), models.state_dict(), error.text
    finally:
        stopping.uninstall()


def halves(is_scaled):
    """A model in two halves, each with an optimizer and a schedule, and one scaler for both."""
    model, _, _ = build(OPTIMIZERS["SGD"])
    optimizers = [
        torch.optim.SGD(model[:2].parameters(), lr=0.03, momentum=0.9),
        torch.optim.AdamW(model[2:].parameters(), lr=0.01),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.97**n) for o in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=is_scaled)
    return model, optimizers, schedules, scaler


@pytest.mark.parametrize(
    ("policy", "is_scaled"),
    [({}, False), ({}, True), ({"enabled": False}, False)],
    ids=["enabled", "scaled", "disabled"],
)
def test_one_update_of_two_optimizers_gives_the_bits_of_the_loop_written_by_hand(
    tmp_path, policy, is_scaled
):
    """One loss, one clipping of all gradients: both optimizers step, or none at an overflow."""
    by_hand, optimizers, schedules, scaler = halves(is_scaled)
    for loss in losses(by_hand, 40):
        scaler.scale(loss).backward()
        for one in optimizers:
            scaler.unscale_(one)
        gradients = [p.grad for p in by_hand.parameters()]
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        is_good = all(bool(grad.isfinite().all()) for grad in gradients)
        for one in optimizers if is_good else ():
            scaler.step(one)
        scaler.update()
        for one, schedule in zip(optimizers, schedules, strict=True):
            if is_good:
                schedule.step()
            one.zero_grad()
    assert (schedules[0].last_epoch < 40) is is_scaled, "there were overflows"
    ours, our_optimizers, our_schedules, our_scaler = halves(is_scaled)
    objects = {"model": ours, "a": our_optimizers[0], "b": our_optimizers[1]}
    objects |= {"sa": our_schedules[0], "sb": our_schedules[1], "scaler": our_scaler}
    with a_run(tmp_path, policy, **objects) as run:
        for _, loss in zip(run.steps(40), losses(ours, 40), strict=False):
            our_scaler.scale(loss).backward()
            run.update(loss, our_optimizers, our_schedules, scaler=our_scaler, clip_norm=0.5)
    assert_same_state(ours.state_dict(), by_hand.state_dict())
    for one, other in zip(
        (*our_optimizers, *our_schedules, our_scaler),
        (*optimizers, *schedules, scaler),
        strict=True,
    ):
        assert_same_state(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("bad_half", [0, 3])
def test_one_update_of_two_optimizers_steps_none_where_one_is_bad(tmp_path, bad_half):
    model, optimizers, _, _ = halves(is_scaled=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with a_run(tmp_path, model=model, a=optimizers[0], b=optimizers[1]) as run:
        for _, loss in zip(run.steps(1), losses(model, 1), strict=False):
            loss.backward()
            model[bad_half].bias.grad.fill_(torch.nan)
            assert run.update(loss, tuple(optimizers)) is False
    assert run._attempt.updater.state_dict()["nan"]["detector"]["total_nans"] == 1
    assert_same_state(dict(model.state_dict()), before)
    assert all(p.grad is None for p in model.parameters())


def test_a_list_of_optimizers_names_the_one_that_the_run_does_not_know(tmp_path):
    model, optimizers, _, _ = halves(is_scaled=False)
    with a_run(tmp_path, model=model, a=optimizers[0]) as run:
        for _, loss in zip(run.steps(1), losses(model, 1), strict=False):
            loss.backward()
            with pytest.raises(forge.ForgeError, match="this AdamW was not given"):
                run.update(loss, optimizers)
            with pytest.raises(forge.ForgeError, match="expected at least one optimizer"):
                run.update(loss, [])


@pytest.mark.parametrize("bad_one", [0, 1])
def test_a_step_with_two_updates_is_bad_if_one_of_them_is(tmp_path, bad_one):
    """A good discriminator must not hide a generator that is always NaN."""
    code, _, reason = two_optimizer_run(tmp_path, bad_one, {"nan": {"max_consecutive": 4}})
    assert code == 65
    assert "in step 5:" in reason
    assert "4 bad steps in a row, limit 4" in reason


def test_a_step_with_two_updates_counts_once(tmp_path):
    code, _, state = two_optimizer_run(tmp_path, 1, {"nan": {"max_consecutive": 5}})
    assert code == 0
    assert state["detector"]["total_nans"] == 4
    assert state["detector"]["consecutive_nans"] == 0


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["optimizer", "schedule", "scaler"])
def test_an_object_that_the_run_does_not_know_is_refused(tmp_path, name):
    """Each stop would silently lose its state."""
    model, optimizer, schedule = build(OPTIMIZERS["SGD"])
    scaler = torch.amp.GradScaler("cpu")
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    del stateful[name]
    schedule = schedule if name != "schedule" else None  # else refused before the first step
    with a_run(tmp_path, **stateful) as run:
        for _, loss in zip(run.steps(1), losses(model, 1), strict=False):
            loss.backward()
            schedule = schedule or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            with pytest.raises(forge.ForgeError, match=rf"run.update\({name}=…\).*{name}={name}"):
                run.update(loss, optimizer, schedule, scaler=scaler)


def test_what_one_update_cannot_step_is_refused_with_what_to_do(tmp_path):
    """`update` does not get the closure or the metric that they need."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    lbfgs = torch.optim.LBFGS([parameter])
    sgd = torch.optim.SGD([parameter], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    stateful = {"weight": _Holder(parameter), "lbfgs": lbfgs, "sgd": sgd, "plateau": plateau}
    with a_run(tmp_path, **stateful) as run:
        for _ in run.steps(1):
            with pytest.raises(forge.errors.ForgeError, match=r"step\(closure\).*should_step"):
                run.update(torch.tensor(1.0), lbfgs)
            with pytest.raises(forge.errors.ForgeError, match=r"schedule.step\(metric\)"):
                run.update(torch.tensor(1.0), sgd, plateau)


OWN_STEPS = {
    "own": lambda run, loss, optimizer: optimizer.step(),
    "update": lambda run, loss, optimizer: run.update(loss, optimizer),
    "guard": lambda run, loss, optimizer: run.should_step(loss) and optimizer.step(),
    "both": lambda run, loss, optimizer: (run.update(loss, optimizer), optimizer.step()),
    "own first": lambda run, loss, optimizer: (optimizer.step(), run.update(loss, optimizer)),
}


@pytest.mark.parametrize("is_in_epochs", [False, True], ids=["steps", "epochs"])
@pytest.mark.parametrize("how", OWN_STEPS)
def test_an_optimizer_that_steps_twice_in_a_step_is_named_once(tmp_path, caplog, how, is_in_epochs):
    """A merge has kept `optimizer.step()`: the model would be trained with twice its rate."""
    caplog.set_level("INFO", logger="forge")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    batches = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)
    with a_run(tmp_path, {"nan": {"action": "halt"}}, model=model, optimizer=optimizer) as run:
        if is_in_epochs:
            loops = (run.batches(batches) for _ in run.epochs(2))
        else:
            loops = (run.steps(n, batches) for n in (3, 6))
        for loop in loops:
            for _, batch in loop:
                loss = model(batch).square().mean()
                loss.backward()
                OWN_STEPS[how](run, loss, optimizer)
                optimizer.zero_grad()
    is_twice = how in ("both", "own first")
    assert caplog.text.count("stepped twice in step 0: remove `optimizer.step()`") == is_twice
