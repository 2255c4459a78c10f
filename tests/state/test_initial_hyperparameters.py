"""Hyperparameters that the script builds differently now, put into the state of a checkpoint."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedules

from forge.errors import ConfigError
from forge.state.changed_hyperparameters import ChangedHyperparameters
from forge.state.initial_hyperparameters import InitialHyperparameters

KINDS = {
    "cosine": lambda o, n: schedules.CosineAnnealingLR(o, 10 * n),
    "step": lambda o, n: schedules.StepLR(o, 3 * n),
    "multi": lambda o, n: schedules.MultiStepLR(o, [2 * n, 5 * n]),
    "one cycle": lambda o, n: schedules.OneCycleLR(o, 0.3 * n, total_steps=50),
    "warm-up": lambda o, n: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.CosineAnnealingLR(o, 9 * n)], [4]
    ),
    "chained": lambda o, n: schedules.ChainedScheduler(
        [schedules.LinearLR(o), schedules.StepLR(o, 2 * n)]
    ),
    "function": lambda o, n: schedules.LambdaLR(o, lambda step: 1 / (1 + n * step)),
    "functions in a row": lambda o, n: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.MultiplicativeLR(o, lambda step: 1 - 1 / (9 * n))], [4]
    ),
    "chained functions": lambda o, n: schedules.ChainedScheduler(
        [schedules.LinearLR(o), schedules.MultiplicativeLR(o, lambda step: 1 - 1 / (9 * n))]
    ),
}


def objects(lr=0.1, kind=None, n=1, **options):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
    found = {"model": model, "optimizer": optimizer}
    if kind is not None:
        found["schedule"] = kind(optimizer, n)
    return found


def trained(found, steps=6):
    for _ in range(steps):
        found["optimizer"].step()
        if "schedule" in found:
            found["schedule"].step()
    return {name: copy.deepcopy(one.state_dict()) for name, one in found.items()}


def adapt(now, saved, record):
    return ChangedHyperparameters(InitialHyperparameters(now), record).adapt(saved)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("lr", "n"), [(0.1, 2), (0.4, 1)])
def test_a_changed_schedule_is_where_it_would_be_had_it_always_been_so(kind, lr, n):
    """The learning rate, settings that are cycled with it, and every value of the schedule."""
    first = objects(kind=kind)
    record = InitialHyperparameters(first).record
    saved = trained(first)
    adapt(objects(lr, kind, n), saved, record)
    expected = trained(objects(lr, kind, n))
    assert saved["schedule"] == expected["schedule"]
    assert saved["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


@pytest.mark.parametrize("kind", [None, *KINDS.values()], ids=["none", *KINDS])
def test_where_nothing_is_built_otherwise_nothing_changes(kind):
    first = objects(kind=kind)
    saved = trained(first)
    saved["optimizer"]["param_groups"][0]["eps"] = 0.5  # as the loop can do
    before = copy.deepcopy(saved)
    record = InitialHyperparameters(objects(kind=kind)).record
    assert adapt(objects(kind=kind), saved, record) == []
    assert str(saved) == str(before)


def test_only_what_is_built_otherwise_is_put_in():
    saved = trained(objects())
    saved["optimizer"]["param_groups"][0]["lr"] = 0.01  # as the loop can do
    found = adapt(objects(betas=(0.5, 0.9)), saved, InitialHyperparameters(objects()).record)
    assert [str(one) for one in found] == [
        "optimizer.param_groups[0].betas: [0.9, 0.999] before, [0.5, 0.9] now"
    ]
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert saved["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.9)


def test_a_rate_that_is_a_tensor_is_put_in_as_one():
    saved = trained(objects(torch.tensor(0.1)))
    found = adapt(
        objects(torch.tensor(0.5)), saved, InitialHyperparameters(objects(torch.tensor(0.1))).record
    )
    assert len(found) == 1
    assert torch.equal(saved["optimizer"]["param_groups"][0]["lr"], torch.tensor(0.5))


def test_a_rate_of_numpy_s_is_put_in_as_well():
    saved = trained(objects(np.float32(0.1)))
    found = adapt(
        objects(np.float32(0.5)), saved, InitialHyperparameters(objects(np.float32(0.1))).record
    )
    assert len(found) == 1
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_what_json_does_not_have_is_left_out_of_the_record():
    assert InitialHyperparameters({"odd": Odd(torch.tensor(1j))}).record == {
        "odd": {"(class)": "Odd"}
    }


def test_a_scaler_takes_its_interval_and_keeps_its_scale():
    one = torch.amp.GradScaler("cpu", init_scale=8.0)
    saved = {"scaler": one.state_dict() | {"scale": 2.0}}
    now = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    adapt({"scaler": now}, saved, InitialHyperparameters({"scaler": one}).record)
    assert (saved["scaler"]["scale"], saved["scaler"]["growth_interval"]) == (2.0, 7)


class Odd:
    """An object of a user's own class."""

    def __init__(self, seed):
        self.seed = seed

    def state_dict(self):
        return {"seed": self.seed}

    def load_state_dict(self, state):
        self.seed = state["seed"]


def test_what_a_user_s_object_has_drawn_is_no_setting():
    """An order of a million indices belongs to the checkpoint, not to this record."""
    drawn = Odd(list(range(101)))
    assert InitialHyperparameters({"odd": drawn}).record == {"odd": {"(class)": "Odd"}}
    now = InitialHyperparameters({"odd": Odd(list(range(7, 200)))})
    ChangedHyperparameters(now, InitialHyperparameters({"odd": drawn}).record).check()


def plateau(optimizer, n):
    return schedules.ReduceLROnPlateau(optimizer, patience=n)


def with_hand_on_it(optimizer, n):
    found = schedules.StepLR(optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.1 * n
    return found


def two_groups():
    return {"optimizer": torch.optim.AdamW([{"params": [torch.ones(1)]} for _ in "ab"], lr=0.1)}


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        (
            objects,
            lambda: {"optimizer": torch.optim.SGD([torch.ones(1)])},
            "(class): AdamW before",
        ),
        (objects, two_groups, "(groups): 1 before, 2 now"),
        (
            partial(objects, kind=plateau),
            partial(objects, kind=plateau, n=2),
            "schedule.patience: 1 before, 2 now",
        ),
        (
            partial(objects, kind=plateau),
            partial(objects, lr=0.5, kind=plateau),
            "`schedule` has already changed this value",
        ),
        (
            partial(objects, kind=with_hand_on_it),
            partial(objects, kind=with_hand_on_it, n=2),
            "has already changed this value",
        ),
        (lambda: {"odd": Odd(1)}, lambda: {"odd": Odd(2)}, "odd.seed: 1 before, 2 now"),
    ],
)
def test_what_cannot_be_decided_is_refused_by_name(before, now, named):
    first = before()
    saved = {name: copy.deepcopy(one.state_dict()) for name, one in first.items()}
    with pytest.raises(ConfigError) as caught:
        adapt(now(), saved, InitialHyperparameters(first).record)
    assert named in str(caught.value)


def test_a_schedule_that_is_too_short_now_is_refused():
    kind = lambda o, n: schedules.OneCycleLR(o, 0.3, total_steps=n)  # noqa: E731
    first = objects(kind=kind, n=50)
    record = InitialHyperparameters(first).record
    with pytest.raises(ConfigError, match=r"schedule: the new schedule fails within 6"):
        adapt(objects(kind=kind, n=4), trained(first), record)
