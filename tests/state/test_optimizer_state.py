"""An optimizer's state is restored exactly, in containers of any kind."""

import collections
import copy

import numpy as np
import pytest
import torch
from placed import resume, save
from torch import nn

from forge.errors import StateMismatch
from forge.state import optimizer_state, restoring
from forge.state.registry import StateRegistry


class Keeps(torch.optim.Optimizer):
    """Has the given state for each parameter."""

    def __init__(self, parameters, state=None):
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"] if state is not None else ():
            self.state[parameter] = state

    def step(self):
        """Nothing."""


def third(*shape, dtype=torch.float32):
    return torch.full(shape, 1 / 3, dtype=dtype)


STATES = {
    "list": lambda: {"a": [third(2), third(2, dtype=torch.float64)]},
    "dict": lambda: {"a": {"left": third(2, 2), "deep": {"right": [third(1)]}}},
    "tuple": lambda: {"a": (third(2), (third(1), 3))},
    "integers": lambda: {"a": [torch.tensor([300, 1])], "b": {"n": torch.tensor(7)}},
    "ordered": lambda: {"a": collections.OrderedDict(b=third(2), a=third(1))},
    "text": lambda: {"a": "fast", "b": ["slow", None], "c": b"raw"},
    "array": lambda: {"a": np.array([1.5, 2.5])},
    "set": lambda: {"a": {1, 2}, "b": {"x"}},
    "tensor": lambda: third(2, 2),
    "step": lambda: {"step": torch.tensor(3.0, dtype=torch.float64), "average": third(2, 2)},
}


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("is_new", [True, False])
def test_state_in_containers_keeps_its_bits(case, is_new, store):
    """Otherwise float32 factors of bfloat16 parameters would lose two thirds of their bits."""
    old, new = (nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for _ in range(2))
    live = StateRegistry({"m": old, "o": Keeps(old.parameters(), STATES[case]())})
    save(store, live)
    state = None if is_new else torch.utils._pytree.tree_map(no_value, STATES[case]())
    again = StateRegistry({"m": new, "o": Keeps(new.parameters(), state)})
    resume(store, again)
    assert str(again.capture()) == str(live.capture())
    found, wanted = (next(iter(one.objects["o"].state.values())) for one in (again, live))
    assert types(found) == types(wanted)


def no_value(leaf):
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def types(value):
    if isinstance(value, dict):
        return type(value), {key: types(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [types(one) for one in value]
    return type(value)


def mixed():
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64)
    return nn.ParameterList([nn.Parameter(torch.randn(3, dtype=dtype)) for dtype in dtypes])


def test_lbfgs_over_parameters_of_two_dtypes_goes_on(store):
    """LBFGS stores all of its lists with the first parameter, which has float32 here."""

    def train(module, optimizer, num_steps):
        def closure():
            optimizer.zero_grad()
            loss = sum(((p.double() - 1) ** 4).sum() for p in module)
            loss.backward()
            return loss

        for _ in range(num_steps):
            optimizer.step(closure)
        optimizer.zero_grad()

    old, new = mixed(), mixed()
    optimizers = [torch.optim.LBFGS(one.parameters(), max_iter=3) for one in (old, new)]
    train(old, optimizers[0], 3)
    save(store, StateRegistry({"m": old, "o": optimizers[0]}))
    resume(store, StateRegistry({"m": new, "o": optimizers[1]}))
    for module, optimizer in zip((old, new), optimizers, strict=True):
        train(module, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("way", ["read in place", "put back twice"])
def test_what_parameters_share_is_one_tensor_again(way, store):
    """Otherwise a counter for all parameters would count for one of them."""
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = Keeps(new.parameters())
    live = StateRegistry({"m": old, "o": Keeps(old.parameters(), {"count": torch.zeros(1)})})
    again = StateRegistry({"m": new, "o": optimizer})
    save(store, live)
    if way == "read in place":
        resume(store, again)
    else:
        saved = store.newest().state["live"]
        restoring.load(again, saved)
        restoring.load(again, saved)
    one, two = (state["count"] for state in optimizer.state.values())
    one += 1
    assert two.tolist() == [1]


def test_state_that_is_the_parameter_itself_is_so_again(store):
    """For example float32 master weights, if the parameters are in float32 anyway."""
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = Keeps(old.parameters())
    optimizer.state[old.weight]["master"] = old.weight.detach()
    save(store, StateRegistry({"m": old, "o": optimizer}))
    again = Keeps(new.parameters())
    resume(store, StateRegistry({"m": new, "o": again}))
    again.state[new.weight]["master"].fill_(5.0)
    assert new.weight.tolist() == [[5, 5], [5, 5]]


def test_the_step_of_a_capturable_optimizer_keeps_its_dtype():
    """With a default dtype of float64 the counter has float64, and torch loads it as float32."""
    torch.set_default_dtype(torch.float64)
    try:
        layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        old, new = (torch.optim.Adam(one.parameters()) for one in layers)
        layers[0](torch.ones(2)).sum().backward()
        old.step()
        old.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    # As on a GPU: a capturable optimizer cannot step on a CPU.
    old.param_groups[0]["capturable"] = new.param_groups[0]["capturable"] = True
    restoring.load(StateRegistry({"o": new}), StateRegistry({"o": old}).capture())
    assert {state["step"].dtype for state in new.state.values()} == {torch.float64}


def test_the_users_hooks_see_the_exact_state_and_have_the_last_word(store):
    """forge does not undo what a user's hook renames or adds."""
    old, new = (nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for _ in range(2))
    save(store, StateRegistry({"o": Keeps(old.parameters(), {"old": [third(2)]})}))
    optimizer, seen = Keeps(new.parameters()), []

    def rename(_, state):
        return state | {"state": {0: {"new": state["state"][0]["old"]}}}

    def look(one):
        (state,) = one.state.values()
        seen.append(state["new"][0].clone())
        state["more"] = "kept"

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(look)
    resume(store, StateRegistry({"o": optimizer}))
    assert torch.equal(seen[0], third(2))
    assert str(optimizer.state[new.weight]) == str({"new": seen, "more": "kept"})
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1, "ours are gone"


def test_state_of_no_parameter_is_a_copy():
    """torch loads the state of the whole optimizer; later steps must not change the saved state."""
    layer = nn.Linear(2, 2)
    optimizer = Keeps(layer.parameters())
    optimizer.state["all"] = {"count": torch.zeros(1)}
    live = StateRegistry({"o": optimizer})
    saved = copy.deepcopy(live.capture())
    restoring.load(live, saved)
    optimizer.state["all"]["count"] += 1
    assert saved["states"]["o"]["state"]["all"]["count"].tolist() == [0]


class Two(torch.optim.Optimizer):
    """Wraps other optimizers, and saves them in its own layout."""

    def __init__(self, *inner):
        self.inner = inner

    @property
    def param_groups(self):
        return [group for one in self.inner for group in one.param_groups]

    @property
    def state(self):
        return {key: value for one in self.inner for key, value in one.state.items()}

    def state_dict(self):
        return {"inner": [one.state_dict() for one in self.inner]}

    def load_state_dict(self, state):
        for one, saved in zip(self.inner, state["inner"], strict=True):
            one.load_state_dict(saved)


def test_an_optimizer_that_wraps_others_is_left_to_itself(store):
    """The state of such an optimizer can have another structure than torch's."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    old, new = (
        Two(torch.optim.Adam([one.weight]), torch.optim.SGD([one.bias], lr=1.0)) for one in layers
    )
    layers[0](torch.ones(2)).sum().backward()
    old.inner[0].step()
    layers[0].zero_grad()
    save(store, StateRegistry({"m": layers[0], "o": old}))
    resume(store, StateRegistry({"m": layers[1], "o": new}))
    assert str(new.state_dict()) == str(old.state_dict())


def test_parameters_in_another_order_are_refused_by_name(store):
    """A set has another order in each process: parameters of one shape would swap their states."""
    old, new = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    save(store, StateRegistry({"m": old, "a": torch.optim.AdamW(old.parameters())}))
    again = StateRegistry(
        {"m": new, "a": torch.optim.AdamW([*new[1].parameters(), *new[0].parameters()])}
    )
    with pytest.raises(
        StateMismatch, match=r"a.param_groups\[0\]\[0\]: m\.0\.weight in .*, m\.1\.weight in"
    ):
        resume(store, again)


@pytest.mark.parametrize(("num_live", "num_saved"), [(1, 2), (2, 1)])
def test_another_number_of_parameters_is_named(num_live, num_saved):
    """More or fewer: the saved state of one parameter must not go to another."""
    live, saved = (
        torch.optim.SGD([torch.zeros(2, requires_grad=True) for _ in range(number)], lr=0.1)
        for number in (num_live, num_saved)
    )
    assert list(optimizer_state.differences("o", live, saved.state_dict())) == [
        f"o.param_groups[0]: {num_saved} parameters in the checkpoint, {num_live} in the object"
    ]


def test_groups_and_states_stay_the_very_dicts_that_they_were():
    """Another optimizer can share them, as in SAM, and the script can have a reference to one."""
    layer = nn.Linear(2, 2)
    outer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    inner = torch.optim.SGD(outer.param_groups, lr=0.1, momentum=0.9)
    groups, group, state = outer.param_groups, outer.param_groups[0], outer.state
    registry = StateRegistry({"layer": layer, "outer": outer, "inner": inner})
    layer(torch.ones(1, 2)).sum().backward()
    outer.step()
    saved = copy.deepcopy(registry.capture())
    group["lr"] = 0.7
    restoring.load(registry, saved)
    assert outer.param_groups is groups
    assert outer.state is state
    assert inner.param_groups[0] is outer.param_groups[0] is group
    assert group["lr"] == 0.1
    assert state[layer.weight]["momentum_buffer"] is not None


class Sharpness(torch.optim.Optimizer):
    """SAM as commonly published: another optimizer steps its groups, also after loading."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


@pytest.mark.parametrize("order", [["outer", "inner"], ["inner", "outer"]])
def test_an_optimizer_inside_another_keeps_the_groups_of_both(order):
    """Otherwise a schedule of the outer optimizer would silently have no effect after a resume."""
    outer = Sharpness(torch.nn.Linear(2, 1).parameters())
    both = {"outer": outer, "inner": outer.base}
    registry = StateRegistry({name: both[name] for name in order})
    saved = registry.capture()
    outer.param_groups[0]["lr"] = 0.5
    restoring.load(registry, saved)
    assert outer.base.param_groups is outer.param_groups
    outer.param_groups[0]["lr"] = 0.01
    assert outer.base.param_groups[0]["lr"] == 0.01
