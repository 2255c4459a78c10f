"""What a script holds besides what it gave to `forge.Run`, as fingerprints."""

import functools
import itertools
import os
import random
import sys
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from forge.state.variables import is_of_script, variables


def held(one, known=()):
    """By path, the variables of a function that has `one`."""
    # Those of this frame come first: the globals of all tests of a run would take most of the time.
    found = variables(sys._getframe(), known)
    here = itertools.takewhile(lambda each: each.function == "held", found)
    return {each.path: each for each in here if each.path.partition(".")[0] == "one"}


class Thing:
    def __init__(self):
        self.x = 0
        self.rng = random.Random(1)


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self):
        self.x = 0


class Hidden(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Dropout()
        self.state = torch.zeros(2)
        self.register_buffer("buffer", torch.zeros(2), persistent=False)


def counter():
    count = 0

    def step():
        nonlocal count
        count += 1

    return step


def remembering():
    def typical(value, history=[], *, best=[]):  # noqa: B006 - as people write it
        history.append(value)
        return history[-1], best

    return typical


def numbers():
    yield from range(100)


CHANGES = {
    "python's generator": (lambda: random.Random(1), lambda one: one.random()),
    "numpy's generator": (lambda: np.random.default_rng(1), lambda one: one.normal()),
    "numpy's old one": (lambda: np.random.RandomState(1), lambda one: one.normal()),
    "torch's generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda one: torch.rand(1, generator=one),
    ),
    "a list": (lambda: [1.0], lambda one: one.append(2)),
    "a deque": (lambda: deque([1], 3), lambda one: one.append(2)),
    "a dict of tensors": (lambda: {"a": torch.zeros(2)}, lambda one: one["a"].add_(1)),
    "a set": (lambda: {"a", "b"}, lambda one: one.add("c")),
    "an array": (lambda: np.zeros(3), lambda one: one.put(0, 1)),
    "an array of objects": (lambda: np.array([None, 1]), lambda one: one.put(1, "a")),
    "a large tensor": (lambda: torch.zeros(1 << 23), lambda one: one.add_(1)),
    "a long list": (lambda: list(range(9999)), lambda one: one.append(1)),
    "a list in itself": (lambda: (a := [1], a.append(a))[0], lambda one: one.append(1)),
    "weights": (lambda: torch.nn.LayerNorm(2), lambda one: one.bias.data.add_(1)),
    "a mode": (lambda: torch.nn.Sequential(torch.nn.Dropout()), lambda one: one[0].eval()),
    "a module's attribute": (Hidden, lambda one: one.state.add_(1)),
    "a buffer that is not saved": (Hidden, lambda one: one.buffer.add_(1)),
    "an optimizer": (
        lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0),
        lambda one: one.param_groups[0].update(lr=2.0),
    ),
    "an attribute": (Thing, lambda one: vars(one).update(x=1)),
    "a generator in an object": (Thing, lambda one: one.rng.random()),
    "a closure": (counter, lambda one: one()),
    "a cache": (lambda: functools.cache(abs), lambda one: one(1)),
    "a slot": (Slotted, lambda one: setattr(one, "x", 1)),
    "a default argument": (remembering, lambda one: one(1)),
    "one of a keyword": (remembering, lambda one: one.__kwdefaults__["best"].append(1)),
    "an iterator": (lambda: iter([1, 2, 3]), next),
    "an iterator over pairs": (lambda: zip([1, 2], [3, 4], strict=False), next),
    "a cycle": (lambda: itertools.cycle([1, 2]), next),
    "a generator function": (numbers, next),
    "a loader's iterator": (lambda: iter(DataLoader([1, 2, 3])), next),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_has_another_fingerprint(name):
    """Each is a state that a loop may keep to itself; and looking changes nothing."""
    make, change = CHANGES[name]
    one, other = make(), make()
    before = held(one)
    assert before
    assert held(one) == before == held(other)
    change(one)
    after = held(one)
    assert [path for path in before if after[path].fingerprint != before[path].fingerprint]
    change(other)
    assert after == held(other)


class Broken:
    """Raises wherever it is looked at."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_what_cannot_be_read_is_left_out():
    """A script that trains must not fail because somebody looks."""
    assert not held(Broken())
    assert not held(sys)
    assert not held(torch.empty(2, device="meta"))


def test_of_what_is_given_to_a_run_only_the_rest_is_read():
    """Its state is compared as leaves already."""
    one = Hidden()
    assert "one" in held(one)
    found = {path: each.kind for path, each in held(one, [one]).items()}
    assert found == {
        "one.buffer": "buffer",
        "one.inner.inplace": "value",
        "one.inner.p": "value",
        "one.state": "buffer",
    }


def test_what_has_a_name_of_its_own_is_no_part_of_another():
    """A hint names `data.level` and not `loader.dataset.level`, which is the same."""
    one = Thing()
    two = [DataLoader(Thing()), one]
    loader = DataLoader(one, sampler=[0])
    assert two
    assert loader
    found = {
        each.path for each in variables(sys._getframe(), ()) if each.function.startswith("test")
    }
    assert "one.x" in found
    assert "loader.sampler" in found
    assert "loader.dataset.x" not in found


def test_a_variable_is_shown_in_a_few_words():
    """In a hint: a person compares two of them."""
    shown = {
        repr(one): held(one)["one"].shown
        for one in (0.1 + 0.2, 7, None, torch.tensor(2.5), torch.zeros(2, 3), [1, 2], "x" * 99)
    }
    assert list(shown.values())[:6] == ["0.3", "7", "None", "2.5", "float32[2, 3]", "list of 2"]
    assert len(list(shown.values())[6]) < 40


class Mine(DataLoader):
    """A subclass of an installed class."""

    def __init__(self):
        super().__init__([1, 2])
        self.mean, self.batch_size_before = 1.5, self.batch_size


def test_attributes_that_an_installed_base_class_sets_are_left_out(monkeypatch):
    """A trainer has dozens of its own, which a resumed job does not need."""
    monkeypatch.setattr("forge.state.variables._NOT_READ", ())
    found = held(Mine())
    assert found.keys() >= {"one.mean", "one.batch_size_before"}
    assert "one.num_workers" not in found
    assert "one.num_workers" in held(DataLoader([1, 2]))


class Mean:
    """Has its first value in the class."""

    mean = 0.0


def test_the_first_value_of_an_attribute_can_be_in_the_class():
    """After a resume it is there again, and the saved value is nowhere."""
    before, after = Mean(), Mean()
    after.mean = 0.5
    assert [held(one)["one.mean"].shown for one in (before, after)] == ["0", "0.5"]


def test_a_module_of_torch_without_a_folder_is_no_script():
    """`torch.ops.__file__` is `_ops.py`."""
    assert not os.path.dirname(torch.ops.__file__)
    assert torch.ops.__file__ not in {os.path.basename(each.file) for each in variables(None, ())}


def test_installed_packages_are_no_script():
    assert is_of_script(__file__)
    assert not is_of_script(torch.__file__)
    assert not is_of_script(random.__file__)
    assert not is_of_script("/elsewhere/site-packages/package/module.py")
    assert not is_of_script("<string>")
