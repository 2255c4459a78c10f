"""Parameters that an optimizer trains are refused if no registered object saves them."""

import pytest
import torch
from torch import nn

import forge
from forge.errors import ConfigError
from forge.state.registry import StateRegistry


def test_a_forgotten_module_is_refused_before_the_first_step(tmp_path):
    """Otherwise the momentum of a trained head would silently apply to the weights of a new one."""
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    policy = {"checkpoint": {"dir": str(tmp_path / "job")}}
    with pytest.raises(forge.Exit) as caught:
        forge.Run(policy, model=model, optimizer=optimizer).open()
    assert caught.value.code == 78
    assert "optimizer.param_groups[0][2], optimizer.param_groups[0][3]: trained" in str(
        caught.value.text
    )
    assert "Give that module to forge.Run" in caught.value.text


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


class Copying(nn.Linear):
    """Returns copies."""

    def state_dict(self, *args, **kwargs):
        return {key: one.clone() for key, one in super().state_dict(*args, **kwargs).items()}


def sgd(*modules):
    return torch.optim.SGD([p for one in modules for p in one.parameters()], lr=1.0)


def frozen(layer):
    layer.bias.requires_grad_(False)
    return {"m": layer, "o": sgd(layer)}


def average(layer):
    return {"m": torch.optim.swa_utils.AveragedModel(layer), "o": sgd(layer)}


CASES = {
    "bare": (nn.Linear, lambda one: {"o": torch.optim.SGD([one.weight, one.bias])}, 2),
    "beside": (nn.Linear, lambda one: {"m": nn.Linear(1, 1), "o": sgd(one)}, 2),
    "registered": (nn.Linear, lambda one: {"m": one, "o": sgd(one)}, 0),
    "registered later": (nn.Linear, lambda one: {"o": sgd(one), "m": one}, 0),
    "in another": (nn.Linear, lambda one: {"m": nn.Sequential(one), "o": sgd(one)}, 0),
    "held": (nn.Linear, lambda one: {"h": Holder(one), "o": sgd(one)}, 0),
    "copied": (Copying, lambda one: {"m": one, "o": sgd(one)}, 0),
    "in a list": (
        nn.Linear,
        lambda one: {"m": nn.ParameterList([one.weight, one.bias]), "o": sgd(one)},
        0,
    ),
    "dropped": (Dropping, lambda one: {"m": one, "o": sgd(one)}, 1),
    "dropped, and not trained": (Dropping, frozen, 0),
    "only its average": (nn.Linear, average, 2),
    "two optimizers": (nn.Linear, lambda one: {"a": sgd(one), "b": sgd(one)}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_that_no_object_saves_is_named(case):
    """By its position in the optimizer, since it has no other name."""
    kind, build, count = CASES[case]
    live = StateRegistry(build(kind(3, 2)))
    if not count:
        live.check_savable()
        return
    with pytest.raises(ConfigError, match="trained, but in no module given") as caught:
        live.check_savable()
    assert str(caught.value).count(".param_groups[0][") == count
