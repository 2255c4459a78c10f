"""A rank that is new has a random state of its own, and the same one at each resume."""

import random

import numpy as np
import torch

from forge.checkpoint.format.manifest import Manifest
from forge.checkpoint.reading import Checkpoint
from forge.state import rng
from forge.training.start import resizing


class Ranks:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def drawn(state):
    """What is drawn from a random state, by each kind of generator."""
    kept = rng.capture_cpu()
    rng.restore(state)
    found = random.random(), float(torch.rand(())), float(np.random.rand())
    rng.restore(kept)
    return found


def test_a_derived_state_is_another_one_and_always_the_same():
    """Dropout must not drop the same on two ranks, and a resume must repeat it."""
    state = rng.capture_cpu()
    expected = drawn(state)
    found = [drawn(resizing.derived(state, number)) for number in (1, 2, 1)]
    assert found[0] == found[2]
    assert all(len({*column}) == 3 for column in zip(expected, *found[:2], strict=True))
    assert drawn(rng.capture_cpu()) == expected


def adapted(rank, size, before=2):
    state = {
        "rng": rng.capture_cpu(),
        "ended": [rng.capture_cpu()],
        "epochs": {"rng": rng.capture_cpu()},
        "live": {"buckets": {"model": [1, 0]}},
    }
    expected = drawn(state["rng"])
    described = Manifest(step=1, attempt=1, files={}, world_size=before)
    found = Checkpoint(None, described, state)
    resizing.adapt(found, Ranks(rank, size))
    states = [state["rng"], *state["ended"], state["epochs"]["rng"]]
    return [drawn(one) == expected for one in states], state["live"]["buckets"]


def test_ranks_that_were_there_keep_theirs():
    """Of where an epoch began they have rank 0's, which must not be drawn from twice."""
    assert adapted(0, 3) == ([True, True, True], {})
    assert adapted(1, 3) == ([True, True, False], {})
    assert adapted(2, 3) == ([False, False, False], {})


class TwoDevices:
    """As torch.cuda with two GPUs; a GPU is not at hand in every test."""

    def __init__(self, current):
        self.states = [torch.tensor([10]), torch.tensor([20])]
        self.current = current

    def is_initialized(self):
        return True

    def device_count(self):
        return 2

    def current_device(self):
        return self.current

    def get_rng_state(self, device):
        return self.states[device].clone()

    def set_rng_state(self, state, device):
        self.states[device] = state


def test_a_rank_that_has_another_device_now_draws_on_as_it_would_have(monkeypatch):
    """Two nodes with a GPU each, and then one with two: rank 1 was on its node's first."""
    monkeypatch.setattr(rng, "DEVICES", ("elsewhere",))
    monkeypatch.setattr(torch, "elsewhere", TwoDevices(0), raising=False)
    saved = rng.capture()
    monkeypatch.setattr(torch, "elsewhere", TwoDevices(1), raising=False)
    torch.elsewhere.states = [torch.tensor([1]), torch.tensor([2])]
    rng.restore(saved)
    assert torch.elsewhere.states[1].item() == 10
    monkeypatch.setattr(torch, "elsewhere", TwoDevices(0), raising=False)
    torch.elsewhere.states = [torch.tensor([1]), torch.tensor([2])]
    rng.restore(saved)
    assert [one.item() for one in torch.elsewhere.states] == [10, 20]
