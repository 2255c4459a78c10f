"""Values of `run.state` that are one object, or share memory, with each other or with objects."""

import collections
import random
import re

import numpy
import pytest
import torch
from nan_trainer import outliving
from rows import each_value
from updates import a_run

import forge


@pytest.fixture(autouse=True)
def _lives_on():
    with outliving():
        yield


class Tracker:
    """An object of the user's whose state is its list itself."""

    def __init__(self):
        self.history = []

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


def train(directory, fill, at, until=None, steps=6, use=lambda run: None):
    """A run that fills `run.state` before the loop, or in step `at`; and uses it in each step."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    noise, tracker = torch.Generator().manual_seed(1), Tracker()
    stateful = {"model": model, "optimizer": optimizer, "noise": noise, "tracker": tracker}
    saves = {"every_steps": None if until is None else 1, "every_s": None}
    policy = {"checkpoint": {"dir": str(directory), **saves}}
    with a_run(directory, policy, **stateful) as run:
        if at == "before":
            fill(run, **stateful)
        for step in run.steps(steps):
            loss = model(torch.randn(3, 2)).square().sum()
            loss.backward()
            run.update(loss, optimizer)
            if step == at:
                fill(run, **stateful)
            if step == until:
                raise RuntimeError("killed")
            if run.state:
                use(run)
    return run.state


def same(make):
    """One object under two names."""

    def fill(run, **_):
        one = make()
        run.state["a"], run.state["b"] = one, {"deep": [one]}

    return fill


def append(run):
    run.state["a"].append(run.step)


def count(run):
    run.state["a"]["n"] = run.state["a"].get("n", 0) + run.step


def add(run):
    run.state["a"] += 1


def draw(run):
    a = run.state["a"]
    a.random() if hasattr(a, "random") else torch.rand(1, generator=a)


KEPT = {
    "list": (list, append),
    "dict": (dict, count),
    "tensor": (lambda: torch.zeros(2), add),
    "array": (lambda: numpy.zeros(2), add),
    "ordered": (collections.OrderedDict, count),
    "counter": (collections.Counter, count),
    "torch generator": (lambda: torch.Generator().manual_seed(3), draw),
    "numpy generator": (lambda: numpy.random.default_rng(3), draw),
    "python generator": (lambda: random.Random(3), draw),
}


@pytest.mark.parametrize(("kind", "at"), each_value([*KEPT], ["before", 1]))
def test_one_object_under_two_names_is_one_after_a_resume(tmp_path, kind, at):
    """It came back as two: what was done to one of them was not done to the other."""
    make, use = KEPT[kind]
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, same(make), at, until=3, use=use)
    state = train(tmp_path, same(make), at, use=use)
    assert state["a"] is state["b"]["deep"][0]


def test_values_that_were_one_object_before_the_loop_can_be_two_afterwards(tmp_path):
    """Filled in place one after the other, the last would count for both."""

    def fill(run, **_):
        run.state["now"] = run.state["best"] = [0]

    def use(run):
        run.state["now"] = [*run.state["now"], run.step]

    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, fill, "before", until=4, use=use)
    state = train(tmp_path, fill, "before", use=use)
    assert dict(state) == {"now": [0, 0, 1, 2, 3, 4, 5], "best": [0]}


def test_what_python_shares_is_not_refused(tmp_path):
    """Numbers, texts, tuples of them: whether they are one object cannot be told."""

    def fill(run, **_):
        for name in "ab":
            run.state[name] = [None, 1, "x", (1, 2), True, b"x", 0.5, torch.float32]

    state = train(tmp_path, fill, "before")
    assert state["a"] == state["b"]


def two(make):
    def fill(run, **stateful):
        run.state["a"], run.state["b"] = make(**stateful)

    return fill


def view(**_):
    one = torch.zeros(4)
    return one, [one[1:3]]


def detached(**_):
    one = torch.zeros(4)
    return one, one.detach()


def numpy_view(**_):
    one = torch.zeros(4)
    return one, one.numpy()


def numpy_slice(**_):
    one = numpy.zeros(4)
    return one, {"x": one[::-1]}


def in_a_tuple(**_):
    one = [1]
    return one, (one,)


REFUSED = {
    "view": (two(view), "run.state.a and run.state.b[0]"),
    "detached": (two(detached), "run.state.a and run.state.b"),
    "numpy view": (two(numpy_view), "run.state.a and run.state.b"),
    "numpy slice": (two(numpy_slice), "run.state.a and run.state.b.x"),
    "in a tuple": (two(in_a_tuple), "run.state.a and run.state.b[0]"),
    "state_dict": (
        lambda run, model, **_: run.state.update(a=model.state_dict()),
        "run.state.a.bias and model.bias",
    ),
    "state of an optimizer": (
        lambda run, optimizer, **_: run.state.update(a=optimizer.state_dict()),
        "run.state.a.state[0] and optimizer.state.0",
    ),
    "data of a parameter": (
        lambda run, model, **_: run.state.update(a=[model.weight.data[0]]),
        "run.state.a[0] and model.weight",
    ),
    "generator of the Run": (
        lambda run, noise, **_: run.state.update(a={"g": noise}),
        "run.state.a.g and noise",
    ),
    "torch's own generator": (
        lambda run, **_: run.state.update(a=torch.default_generator),
        "run.state.a and torch.default_generator",
    ),
    "list of an object": (
        lambda run, tracker, **_: run.state.update(a=tracker.history),
        "run.state.a and tracker.history",
    ),
}


@pytest.mark.parametrize(
    ("kind", "at"),
    [(kind, 1) for kind in REFUSED] + [(k, "before") for k in ("view", "state_dict", "in a tuple")],
)
def test_memory_that_a_resume_would_not_share_is_refused_by_both_names(tmp_path, kind, at):
    """After a resume they were two, and a run that was not interrupted had one."""
    fill, names = REFUSED[kind]
    with pytest.raises(forge.Exit) as caught:
        train(tmp_path, fill, at)
    assert caught.value.code == 74
    assert re.search(rf"^{re.escape(names)} (share memory|are the same)", caught.value.text)
    assert "Keep a " in caught.value.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, requires_grad=True),
        lambda: torch.zeros(2, requires_grad=True) * 2,
        lambda: torch.nn.Parameter(torch.zeros(2)),
        lambda: torch.nn.Parameter(torch.zeros(2), requires_grad=False),
    ],
)
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: {"x": [one]}, lambda one: (one,)])
def test_a_tensor_that_is_trained_is_refused_as_it_is_assigned(tmp_path, make, wrap):
    """It came back as a plain tensor, which nothing trains."""
    with pytest.raises(forge.errors.CheckpointError, match=r"run\.state\.a.*detach\(\)\.clone\(\)"):
        train(tmp_path, lambda run, **_: run.state.update(a=wrap(make())), "before")


def test_a_tensor_that_is_to_be_trained_later_is_refused_at_the_save(tmp_path):
    """It was a plain one as it was assigned."""
    with pytest.raises(forge.Exit, match=r"run\.state\.a: .*requires grad"):
        train(
            tmp_path,
            lambda run, **_: run.state.update(a=torch.zeros(1)),
            1,
            use=lambda run: run.state["a"].requires_grad_(True),
        )


def test_an_array_that_cannot_be_written_comes_back_as_one(tmp_path):
    """Whoever would write to it gets the same error as without a resume."""

    def fill(run, **_):
        run.state["a"], run.state["b"] = numpy.frombuffer(b"abcd", "u1"), numpy.zeros(2)
        run.state["t"] = numpy.zeros((2, 3)).T
        run.state["t"].flags.writeable = False

    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, fill, 1, until=3)
    state = train(tmp_path, fill, None)
    assert [state[name].flags.writeable for name in "abt"] == [False, True, False]
    assert bytes(state["a"]) == b"abcd"
    assert state["t"].flags.f_contiguous
