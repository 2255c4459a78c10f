"""State files do not name their class: forge refuses wrong ones that torch would load silently."""

import copy

import pytest
import torch
from torch import nn

from forge.config.schema import CheckpointConfig
from forge.errors import StateMismatch
from forge.state.registry import StateRegistry
from forge.training.start import init_from

optim, schedules = torch.optim, torch.optim.lr_scheduler


def text_of(live):
    return str({name: one.state_dict() for name, one in live.objects.items()})


def begin(live, source, tmp_path):
    torch.save(source, tmp_path / "source.pt")
    return init_from.load(CheckpointConfig(init_from=str(tmp_path / "source.pt")), live)


def trained(kind, **options):
    layer = nn.Linear(2, 1)
    optimizer = kind(layer.parameters(), **options)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def schedule(make):
    return make(optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9))


class Custom(optim.Optimizer):
    """An optimizer whose states are not dicts, with fewer settings than Adam."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = parameter.grad.clone()


OPTIMIZERS = {
    "Adam to SGD": (optim.Adam, {}, optim.SGD, r"o\.param_groups\[0\]\.betas: the checkpoint has"),
    "SGD to Adam": (
        optim.SGD,
        {},
        optim.Adam,
        r"o\.param_groups\[0\]\.momentum: the checkpoint has",
    ),
    "Adam to RAdam": (
        optim.Adam,
        {},
        optim.RAdam,
        r"o\.param_groups\[0\]\.amsgrad: the checkpoint has",
    ),
    "RMSprop to SGD": (
        optim.RMSprop,
        {},
        optim.SGD,
        r"o\.param_groups\[0\]\.alpha: the checkpoint has",
    ),
    "Adam to a user's": (optim.Adam, {}, Custom, r"o\.param_groups\[0\]\.eps: the checkpoint has"),
    "a user's to Adam": (Custom, {}, optim.Adam, r"o\.state\[0\]: float32.*, a dict in the"),
    "the same": (optim.SGD, {"momentum": 0.9}, optim.SGD, None),
    "a user's": (Custom, {}, Custom, None),
    "Adam to AdamW": (optim.Adam, {}, optim.AdamW, None),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_told_by_its_settings(case, tmp_path):
    """SGD with Adam's settings fails at its first step, and has no use for Adam's averages."""
    kind, options, other, complaint = OPTIMIZERS[case]
    state = trained(kind, **options).state_dict()
    layer = nn.Linear(2, 1)
    live = StateRegistry({"o": other(layer.parameters(), lr=0.5), "m": layer})
    before = text_of(live)
    if complaint is None:
        begin(live, {"o": state}, tmp_path)
        found = live.objects["o"].state_dict()
        assert str(found["state"]) == str(state["state"])
        assert found["param_groups"][0]["lr"] == state["param_groups"][0]["lr"]
    else:
        with pytest.raises(StateMismatch, match=complaint):
            begin(live, {"o": state, "m": nn.Linear(2, 1).state_dict()}, tmp_path)
        assert text_of(live) == before


SCHEDULES = {
    "step to cosine": (
        lambda o: schedules.StepLR(o, 3),
        lambda o: schedules.CosineAnnealingLR(o, 10),
        r"s\.T_max: nothing in the checkpoint, a int in the object",
    ),
    "step to exponential": (
        lambda o: schedules.StepLR(o, 3),
        lambda o: schedules.ExponentialLR(o, 0.5),
        r"s\.step_size: a int in the checkpoint, nothing in the object",
    ),
    "below a sequence": (
        lambda o: schedules.SequentialLR(o, [schedules.StepLR(o, 3)] * 2, [5]),
        lambda o: schedules.SequentialLR(
            o, [schedules.StepLR(o, 3), schedules.ConstantLR(o)], milestones=[5]
        ),
        r"s\._schedulers\[1\]\.factor: nothing in the checkpoint, a float",
    ),
    "a sequence of others": (
        lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 3)]),
        lambda o: schedules.ChainedScheduler([schedules.StepLR(o, 3)] * 2),
        r"s\._schedulers: \S+ in the checkpoint, 2 schedules",
    ),
    "the same": (lambda o: schedules.StepLR(o, 3), lambda o: schedules.StepLR(o, 5), None),
    "one cycle": (
        lambda o: schedules.OneCycleLR(o, 1.0, total_steps=9),
        lambda o: schedules.OneCycleLR(o, 2.0, total_steps=7),
        None,
    ),
    "plateau": (schedules.ReduceLROnPlateau, schedules.ReduceLROnPlateau, None),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_the_state_of_another_schedule_is_told_by_its_attributes(case, tmp_path):
    """torch would set them as attributes that the schedule never reads."""
    source, target, complaint = SCHEDULES[case]
    state = schedule(source).state_dict()
    live = StateRegistry({"s": schedule(target)})
    before = text_of(live)
    if complaint is None:
        state["last_epoch"] = 4
        state["verbose"] = False  # as in older versions of torch
        begin(live, {"s": state}, tmp_path)
        assert live.objects["s"].last_epoch == 4
    else:
        with pytest.raises(StateMismatch, match=complaint):
            begin(live, {"s": state}, tmp_path)
        assert text_of(live) == before


BAD_GROUPS = {
    "no rate": ({"params": [0, 1], "momentum": 0}, r"o\.param_groups\[0\]\.lr: the object has"),
    "no parameters": (
        {"lr": 1.0},
        "expected the state of an optimizer in the checkpoint, found state, pa",
    ),
}


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_a_group_that_lacks_something_is_named(case, tmp_path):
    """SGD without a learning rate fails at its first step."""
    group, complaint = BAD_GROUPS[case]
    full = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).state_dict()["param_groups"][0]
    group = {key: value for key, value in full.items() if key not in ("lr", "params")} | group
    layer = nn.Linear(2, 1)
    live = StateRegistry({"m": layer, "o": optim.SGD(layer.parameters(), lr=0.5)})
    with pytest.raises(StateMismatch, match=complaint):
        begin(
            live,
            {"m": nn.Linear(2, 1).state_dict(), "o": {"state": {}, "param_groups": [group]}},
            tmp_path,
        )


class Fussy:
    """Refuses states with a negative value."""

    def __init__(self):
        self.value = 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.value < 0:
            raise LookupError(f"no such thing as {self.value}")


def test_a_refusal_by_an_object_is_named(tmp_path):
    """forge cannot check such a state before it is loaded, but the run does not start."""
    live = StateRegistry({"f": Fussy()})
    with pytest.raises(StateMismatch, match=r"(?s)f: .*no such thing as -1.*run does not start"):
        begin(live, {"f": {"value": -1}}, tmp_path)


def test_a_checkpoint_brings_what_only_its_optimizer_held(open_store, tmp_path):
    """Momentum without its weights would be half of the state."""

    def build(value):
        bare = nn.Parameter(torch.full((2,), value))
        return StateRegistry({"o": optim.SGD([bare], lr=1.0, momentum=0.9)}), bare

    live, _ = build(3.0)
    store = open_store(tmp_path / "job")
    saved = copy.deepcopy(live.capture())
    store.commit(store.snapshot(1, {"live": saved}, copy=False))
    target, bare = build(0.0)
    init_from.load(CheckpointConfig(init_from=str(tmp_path / "job")), target)
    assert bare.tolist() == [3, 3]
    saved["unregistered"]["o"]["param_groups[0][0]"] = torch.ones(5)
    store.commit(store.snapshot(2, {"live": saved}, copy=False))
    with pytest.raises(StateMismatch, match=r"o\.param_groups\[0\]\[0\]: .*, float32\[2\] in"):
        init_from.load(CheckpointConfig(init_from=str(tmp_path / "job")), target)
    assert bare.tolist() == [3, 3]
