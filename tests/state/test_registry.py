"""State is restored exactly into its objects, or nothing changes and the error says why."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from forge.errors import ConfigError, StateMismatch
from forge.state import restoring
from forge.state.registry import StateRegistry


def model(*sizes, **options):
    return nn.Sequential(*(nn.Linear(a, b, **options) for a, b in itertools.pairwise(sizes)))


def trained(kind, layer, **options):
    optimizer = kind(layer.parameters(), **options)
    parameter = next(layer.parameters())
    x = torch.ones(1, parameter.shape[-1], dtype=parameter.dtype)

    def closure():
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    return optimizer


def refusal(live, saved):
    before = str(live.capture())
    with pytest.raises(StateMismatch) as error:
        restoring.load(live, saved)
    assert str(live.capture()) == before, "a misfit must change nothing"
    return str(error.value)


CASES = {
    "missing": (
        lambda: model(2, 3),
        lambda: model(2, 3, 1),
        "model.1.weight: nothing in the checkpoint, float32[1, 3] in the object",
    ),
    "unexpected": (
        lambda: model(2, 3, 1),
        lambda: model(2, 3),
        "model.1.bias: float32[1] in the checkpoint, nothing in the object",
    ),
    "shape": (
        lambda: model(2, 3),
        lambda: model(2, 4),
        "model.0.weight: float32[3, 2] in the checkpoint, float32[4, 2] in the object",
    ),
    "dtype": (
        lambda: model(2, 3),
        lambda: model(2, 3, dtype=torch.float64),
        "model.0.weight: float32[3, 2] in the checkpoint, float64[3, 2] in the object",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_that_does_not_fit_is_named_leaf_by_leaf(case):
    """'size mismatch' deep in a traceback costs an hour; a silent fresh start costs a week."""
    old, new, sentence = CASES[case]
    saved = StateRegistry({"model": old()}).capture()
    assert sentence in refusal(StateRegistry({"model": new()}), saved)


def test_many_differences_are_counted_not_listed():
    """A completely different model has hundreds of differences."""
    text = refusal(
        StateRegistry({"m": model(*[2] * 9)}), StateRegistry({"m": model(2, 3)}).capture()
    )
    assert text.count("\n  - ") == 9
    assert "… and 8 more" in text


def test_an_object_too_few_or_too_many_is_named():
    """Otherwise a forgotten schedule would start again with its first learning rate."""
    one, two = (
        StateRegistry({"a": model(1, 1)}),
        StateRegistry({"a": model(1, 1), "b": model(1, 1)}),
    )
    assert "b: was given to forge.Run, but is not in the checkpoint" in refusal(two, one.capture())
    assert "b: is in the checkpoint, but was not given to forge.Run" in refusal(one, two.capture())


def test_another_optimizer_is_refused():
    """SGD would silently drop Adam's averages."""
    layer = model(2, 1)
    saved = StateRegistry({"o": torch.optim.Adam(layer.parameters())}).capture()
    text = refusal(StateRegistry({"o": torch.optim.SGD(layer.parameters(), lr=1.0)}), saved)
    assert "the state of a torch.optim.adam.Adam, but forge.Run was given a torch.optim.sgd" in text


def test_other_parameter_groups_are_refused():
    """Otherwise learning rates and weight decays would apply to the wrong parameters."""
    one, two = model(2, 1), model(2, 1, 1)
    saved = StateRegistry({"o": torch.optim.SGD(one.parameters(), lr=1.0)}).capture()
    groups = [{"params": [p]} for p in one.parameters()]
    text = refusal(StateRegistry({"o": torch.optim.SGD(groups, lr=1.0)}), saved)
    assert "o.param_groups: 1 groups in the checkpoint, 2 in the object" in text
    text = refusal(StateRegistry({"o": torch.optim.SGD(two.parameters(), lr=1.0)}), saved)
    assert "o.param_groups[0]: 2 parameters in the checkpoint, 4 in the object" in text


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_averages_of_parameters_of_another_shape_are_refused(shape):
    """If no registered module has the parameters, only the optimizer's state shows it."""
    old = nn.Parameter(torch.ones(1, 8))
    optimizer = torch.optim.Adam([old])
    old.sum().backward()
    optimizer.step()
    saved = StateRegistry({"o": optimizer}).capture()
    new = torch.optim.Adam([nn.Parameter(torch.ones(shape))])
    saved["grads"] = {}
    assert "o.state[0].exp_avg: [" in refusal(StateRegistry({"o": new}), saved)


OPTIMIZERS = {
    "Adafactor": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "LBFGS": {},
    "SGD": {"momentum": 0.9},
    "Rprop": {},
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop": {"centered": True},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(3, 2), (4, 1), (1, 1), (1, 5)], ids=str)
def test_every_optimizer_goes_back_to_the_same_bits(name, sizes):
    """Factored and flat states have other shapes than their parameters, which is not a mismatch."""
    kind = getattr(torch.optim, name)
    layer = model(*sizes)
    layer.insert(0, nn.LayerNorm(sizes[0]))  # its first parameter has one dimension
    live = StateRegistry({"layer": layer, "o": trained(kind, layer, **OPTIMIZERS[name])})
    saved = live.capture()
    other = model(*sizes)
    other.insert(0, nn.LayerNorm(sizes[0]))
    again = StateRegistry({"layer": other, "o": kind(other.parameters(), **OPTIMIZERS[name])})
    restoring.load(again, saved)
    assert str(again.capture()) == str(saved)


class Float32Momentum(torch.optim.Optimizer):
    """Has float32 averages for bfloat16 parameters, as many optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = torch.full(parameter.shape, 1 / 3)


def test_averages_in_a_wider_type_than_their_parameters_stay_exact():
    """`Optimizer.load_state_dict` casts them to bfloat16, which loses two thirds of the bits."""
    layer = model(2, 1, dtype=torch.bfloat16)
    saved = StateRegistry({"o": trained(Float32Momentum, layer)}).capture()
    optimizer = Float32Momentum(layer.parameters())
    restoring.load(StateRegistry({"o": optimizer}), saved)
    average = optimizer.state[layer[0].weight]["average"]
    assert average.dtype is torch.float32
    assert torch.equal(average, torch.full((1, 2), 1 / 3))


def test_what_was_loaded_is_independent_of_the_checkpoint_in_memory():
    """Otherwise a second load, for a repeated step, would get values that training has changed."""
    layer = model(2, 1)
    live = StateRegistry({"layer": layer, "o": trained(torch.optim.Adam, layer)})
    layer(torch.ones(1, 2)).sum().backward()
    saved = copy.deepcopy(live.capture())
    expected = str(saved)
    restoring.load(live, saved)
    layer(torch.ones(1, 2)).sum().backward()
    live.objects["o"].step()
    assert str(saved) == expected


def test_gradients_that_are_being_accumulated_come_back_and_others_are_cleared():
    """A stop between two micro-batches has to be exact, too."""
    layer = model(2, 1)
    live = StateRegistry({"layer": layer})
    layer[0].weight.grad = torch.tensor([[1.0, 2.0]])
    saved = live.capture()
    layer[0].weight.grad, layer[0].bias.grad = None, torch.ones(1)
    restoring.load(live, saved)
    assert layer[0].weight.grad.tolist() == [[1, 2]]
    assert layer[0].bias.grad is None


def test_tied_parameters_and_generators_are_taken_once():
    """A generator is not a module, but its state decides the next draws."""
    layer = nn.Linear(2, 2)
    layer.again = layer.weight
    generator = torch.Generator().manual_seed(1)
    live = StateRegistry({"layer": layer, "g": generator})
    assert [name for name, _ in live.parameters()] == ["layer.weight", "layer.bias"]
    saved = live.capture()
    expected = torch.rand(3, generator=generator)
    restoring.load(live, saved)
    assert torch.equal(torch.rand(3, generator=generator), expected)


def test_accumulated_gradients_of_shared_parameters_know_them_by_any_name():
    """A parameter's first name depends on the order of the arguments, which must not matter."""
    one = nn.Linear(2, 1)
    two = nn.Sequential(one)
    one.weight.grad = torch.tensor([[1.0, 2.0]])
    one.bias.requires_grad_(False)
    saved = copy.deepcopy(StateRegistry({"a": one, "b": two}).capture())
    one.weight.grad = None
    one.bias.requires_grad_(True)
    restoring.load(StateRegistry({"b": two, "a": one}), saved)
    assert one.weight.grad.tolist() == [[1, 2]]
    assert not one.bias.requires_grad


def test_a_gradient_that_belongs_to_nothing_is_named():
    """Otherwise the accumulated gradient would be lost."""
    layer = nn.Linear(2, 1)
    live = StateRegistry({"layer": layer})
    saved = live.capture()
    saved["grads"] = {"layer.other": torch.ones(1)}
    with pytest.raises(StateMismatch, match=r"layer\.other: its gradient is in the checkpoint"):
        restoring.load(live, saved)


class Average:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("first", ["__main__", "__mp_main__"])
def test_a_class_of_the_script_is_one_in_a_sweep_and_alone(first, monkeypatch):
    """A sweep imports the script as multiprocessing does, but `resume.sh` runs it as `__main__`."""
    second = {"__main__": "__mp_main__", "__mp_main__": "__main__"}[first]
    monkeypatch.setattr(Average, "__module__", first)
    average = Average()
    average.value = 3
    saved = StateRegistry({"a": average}).capture()
    assert saved["kinds"] == {"a": "__main__.Average"}
    saved["kinds"]["a"] = f"{first}.Average"  # as in checkpoints of the first versions
    monkeypatch.setattr(Average, "__module__", second)
    average.value = 0
    restoring.load(StateRegistry({"a": average}), saved)
    assert average.value == 3
    saved["kinds"]["a"] = "other.Average"
    with pytest.raises(StateMismatch, match=r"other\.Average, but .* given a __main__\.Average"):
        restoring.load(StateRegistry({"a": average}), saved)


class OnlySaves:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    "value", [3, "x", lambda: 0, [1], OnlySaves(), nn.Parameter(torch.ones(1))]
)
def test_what_has_no_state_is_refused_by_name(value):
    """Its state would be lost at every stop."""
    with pytest.raises(ConfigError, match=r"forge\.Run\(thing=…\): a .* has no state_dict"):
        StateRegistry({"thing": value})


class Fails:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise KeyError("b")


def test_an_objects_own_refusal_is_named():
    """With ten objects in a run, the first question is which of them failed."""
    live = StateRegistry({"mine": Fails()})
    with pytest.raises(StateMismatch, match=r"mine: .*Fails\.load_state_dict failed: 'b'"):
        restoring.load(live, live.capture())


def test_lists_and_dicts_of_objects_are_saved_one_by_one():
    """For scripts with two optimizers, for example; an error names the element."""
    nets = {"actor": model(2, 1), "critic": model(2, 1)}
    optimizers = [trained(torch.optim.Adam, net) for net in nets.values()]
    registry = StateRegistry({"nets": nets, "optimizers": tuple(optimizers)})
    assert list(registry.objects) == ["nets.actor", "nets.critic", "optimizers.0", "optimizers.1"]
    assert registry.has(optimizers[1])
    with pytest.raises(StateMismatch, match=r"nets\.critic\.0\.weight: .*, float32\[1, 3\] in"):
        restoring.load(
            StateRegistry({"nets": {**nets, "critic": model(3, 1)}, "optimizers": optimizers}),
            registry.capture(),
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
        lambda: random.Random(3),
        lambda: torch.Generator().manual_seed(3),
    ],
)
def test_generators_of_every_kind_come_back_in_place(make):
    def drawn(one):
        if isinstance(one, torch.Generator):
            return torch.rand(3, generator=one).tolist()
        return [(one.gauss if isinstance(one, random.Random) else one.normal)(0, 1) for _ in "abc"]

    one, other = make(), make()
    drawn(one)
    saved = StateRegistry({"rng": one}).capture()
    expected = drawn(one)
    restoring.load(StateRegistry({"rng": other}), saved)
    assert drawn(other) == expected


def test_the_state_of_another_kind_of_generator_is_refused():
    """The generator would draw another sequence."""
    saved = StateRegistry({"rng": np.random.Generator(np.random.PCG64(3))}).capture()
    other = np.random.Generator(np.random.MT19937(3))
    with pytest.raises(StateMismatch, match=r"rng: .*saved state is of .*PCG64.*MT19937"):
        restoring.load(StateRegistry({"rng": other}), saved)
