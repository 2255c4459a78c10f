"""Parameters that an optimizer trains are restored, even if no registered object has them."""

import pytest
import torch
from placed import resume, save
from torch import nn

import forge
from forge.errors import StateMismatch
from forge.state import restoring
from forge.state.registry import StateRegistry


class Stop(Exception):
    """Ends a run like a crash."""


def train(directory, stop=None):
    """A run that registers its model, but forgets its head."""
    torch.manual_seed(0)
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    policy = {"health": {"enabled": False}, "checkpoint": {"dir": str(directory), "every_steps": 1}}
    with forge.Run(policy, model=model, optimizer=optimizer) as run:
        for step in run.steps(4):
            if step == stop:
                raise Stop
            loss = (head(model(torch.randn(4, 2))) - 1).square().mean()
            loss.backward()
            run.update(loss, optimizer)
    return [*model.parameters(), *head.parameters()]


def test_a_forgotten_module_goes_on_where_it_was_and_is_told_of(tmp_path, caplog):
    """Otherwise the momentum of a trained head would silently apply to the weights of a new one."""
    expected = train(tmp_path / "undisturbed")
    with pytest.raises(Stop):
        train(tmp_path / "job", stop=2)
    found = train(tmp_path / "job")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    sentence = "optimizer trains parameters that are in no other object given to forge.Run"
    assert caplog.text.count(f"{sentence} (param_groups[0][2], param_groups[0][3])") == 3


class Holder:
    """Has a module, but is not a module itself."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return {"net": [self.module.state_dict()]}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["net"][0])


class Dropping(nn.Linear):
    """Omits its bias from its state."""

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        del found["bias"]
        return found

    def load_state_dict(self, state, strict=False):
        super().load_state_dict(state, strict)


def sgd(*modules):
    return torch.optim.SGD([p for one in modules for p in one.parameters()], lr=1.0)


def bare(layer):
    return {"o": torch.optim.SGD([layer.weight, layer.bias])}


def frozen(layer):
    layer.bias.requires_grad_(False)
    return {"m": layer, "o": sgd(layer)}


CASES = {
    "bare": (nn.Linear, bare, 2, True),
    "beside": (nn.Linear, lambda one: {"m": nn.Linear(1, 1), "o": sgd(one)}, 2, True),
    "registered": (nn.Linear, lambda one: {"m": one, "o": sgd(one)}, 0, False),
    "registered later": (nn.Linear, lambda one: {"o": sgd(one), "m": one}, 0, False),
    "in another": (nn.Linear, lambda one: {"m": nn.Sequential(one), "o": sgd(one)}, 0, False),
    "held": (nn.Linear, lambda one: {"h": Holder(one), "o": sgd(one)}, 2, False),
    "dropped": (Dropping, lambda one: {"m": one, "o": sgd(one)}, 1, False),
    "dropped, and not trained": (Dropping, frozen, 0, False),
    "only its average": (
        nn.Linear,
        lambda one: {"m": torch.optim.swa_utils.AveragedModel(one), "o": sgd(one)},
        2,
        True,
    ),
    "two optimizers": (nn.Linear, lambda one: {"a": sgd(one), "b": sgd(one)}, 4, True),
}


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_that_is_trained_comes_back_once(case, store, caplog):
    """A parameter in a module's state is saved only there; if all have one, there is no warning."""
    kind, build, count, is_told = CASES[case]
    layers = [kind(3, 2), kind(3, 2)]
    live, again = (StateRegistry(build(one)) for one in layers)
    captured = live.capture()
    assert sum(map(len, captured["unregistered"].values())) == count
    live.check_savable()
    assert ("in no other object" in caplog.text) == is_told
    path = save(store, live)
    resume(store, again)
    for (key, one), two in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        is_lost = case == "dropped, and not trained" and key == "bias"
        assert torch.equal(one, two) != is_lost
    if case == "held":
        assert (path / "tensors_rank00000.safetensors").read_bytes().count(b"dtype") == 2


def test_what_does_not_fit_is_named_and_changes_nothing():
    """The error names its index in the optimizer, since the parameter has no other name."""
    old, new = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2))
    saved = StateRegistry({"o": torch.optim.SGD([old])}).capture()
    live = StateRegistry({"o": torch.optim.SGD([new])})
    with pytest.raises(
        StateMismatch, match=r"o\.param_groups\[0\]\[0\]: float32\[3\] in .*, float32\[2\] in the o"
    ):
        restoring.load(live, saved)
    saved["unregistered"] = {}
    with pytest.raises(
        StateMismatch, match=r"\[0\]\[0\]: nothing in .*, float32\[2\] in the object"
    ):
        restoring.load(live, saved)
    assert new.tolist() == [0, 0]
