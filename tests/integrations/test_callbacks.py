"""Which values of a trainer's callback are named, since a resume would lose them."""

import functools

import torch

from forge.integrations.callbacks import lost_on_resume


def on_rank_zero(method):
    """As Lightning's rank_zero_only."""

    @functools.wraps(method)
    def wrapped(*given):
        return method(*given)

    return wrapped


class Counts:
    """Changes two of its values, one of them in a decorated method."""

    def __init__(self):
        self.every, self.count, self.best = 10, 0, 0.0

    def on_train_batch_end(self, *_):
        self.count += 1

    @on_rank_zero
    def on_train_epoch_end(self, *_):
        self.best = max(self.best, 1.0)


class Options:
    """Has options alone, like most callbacks."""

    def __init__(self):
        self.every, self.path, self.is_on = 10, "grid.png", True

    def on_train_epoch_end(self, *_):
        print(self.every, self.path, self.is_on)


class Derived(Counts):
    """A method of a base class changes its values."""


class Keeps:
    """A list can change without being assigned."""

    def __init__(self):
        self.losses, self.mean = [], torch.zeros(())


def test_values_that_a_method_assigns_are_named():
    """A resumed job would count from 0 again; the option is as it was."""
    for kind in (Counts, Derived):
        sentence = lost_on_resume(kind())
        assert sentence.startswith(
            f"the callback {kind.__name__} has no state_dict, so count, best"
        )


def test_options_of_the_constructor_are_not_named():
    """A warning at each start of a correct script teaches users to ignore warnings."""
    assert lost_on_resume(Options()) is None


def test_containers_and_tensors_are_named():
    """Methods can change them in place."""
    assert "so losses, mean would" in lost_on_resume(Keeps())
