"""Random states of every kind come back, and seeded datasets leave them as they were."""

import random
from contextlib import closing

import pytest
import torch
from number_datasets import Numbers, Stream

from forge.checkpoint.store import Store
from forge.config.schema import CheckpointConfig
from forge.data import seeding
from forge.errors import CheckpointError
from forge.state import rng


def test_seeded_draws_are_a_function_of_seed_epoch_and_index():
    """Neither of who draws, nor of when, nor of what was drawn before."""
    one, two = seeding.seeded(Numbers(4, draws=True), 1), seeding.seeded(Numbers(4, draws=True), 1)
    first = [one[i].item() for i in range(4)]
    torch.rand(7)
    assert [two[i].item() for i in (3, 1, 0, 2)] == [first[i] for i in (3, 1, 0, 2)]
    assert len({value % 1 for value in first}) == 4
    two.set_epoch(1)
    assert two[0].item() != first[0]
    assert seeding.seeded(Numbers(4, draws=True), 2)[0].item() != first[0]


def test_seeded_draws_leave_no_trace_in_the_generators():
    """Training's own draws must not depend on how many samples were read."""
    numpy = pytest.importorskip("numpy")

    class DrawsFromAll(Numbers):
        def __getitem__(self, index):
            return torch.rand(1).item(), random.random(), numpy.random.rand()

    dataset = seeding.seeded(DrawsFromAll(3), 1)
    before = str(rng.capture())
    assert dataset[0] == dataset[0] != dataset[1]
    assert str(rng.capture()) == before


def test_seeded_refuses_a_dataset_without_indices():
    """There is nothing to seed with."""
    with pytest.raises(TypeError, match="map-style dataset"):
        seeding.seeded(Stream(), 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda numpy: random.random(),
        lambda numpy: random.gauss(0, 1),
        lambda numpy: random.seed(1),
        lambda numpy: numpy.random.rand(),
        lambda numpy: numpy.random.normal(),
        lambda numpy: numpy.random.seed(1),
        lambda numpy: numpy.random.set_state({**numpy.random.get_state(legacy=False), "gauss": 3}),
    ],
)
def test_a_state_is_read_again_after_each_use_of_a_generator(use):
    """The second of two normal numbers moves no generator: it is the half that waits."""
    numpy = pytest.importorskip("numpy")
    rng.capture()
    for _ in range(3):
        use(numpy)
        state = rng.capture()
        assert state["python"] == random.getstate()
        now = numpy.random.get_state(legacy=False)
        words, *rest = state["numpy"]
        assert bytes(words.tolist()) == now["state"]["key"].tobytes()
        assert rest == [now["state"]["pos"], now["has_gauss"], now["gauss"]]


def test_what_numpy_draws_comes_back_to_the_bit(tmp_path):
    """Half a normal pair waits."""
    numpy = pytest.importorskip("numpy")
    numpy.random.normal()
    with closing(Store(tmp_path, CheckpointConfig())) as store:
        store.commit(store.snapshot(1, rng.capture(), copy=False))
        saved = store.newest().state
    expected = [numpy.random.normal(), *numpy.random.randint(99, size=3), numpy.random.rand()]
    numpy.random.rand(1000)
    rng.restore(saved)
    found = [numpy.random.normal(), *numpy.random.randint(99, size=3), numpy.random.rand()]
    assert found == expected


def test_another_global_generator_of_numpy_is_refused_by_name():
    """`numpy.random.set_bit_generator` replaces it; its state would be lost at a stop."""
    numpy = pytest.importorskip("numpy")
    before, state = numpy.random.get_bit_generator(), rng.capture()
    numpy.random.set_bit_generator(numpy.random.PCG64())
    try:
        for ask in (rng.capture, lambda: rng.restore(state)):
            with pytest.raises(CheckpointError, match=r"is a PCG64, .*set_bit_generator"):
                ask()
    finally:
        numpy.random.set_bit_generator(before)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_other_devices_come_back_as_cuda_does(kind, monkeypatch):
    """There is none here: two generators of the CPU stand for those of two devices."""
    devices = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "device_count", lambda: 2)
    monkeypatch.setattr(module, "is_initialized", lambda: True, raising=False)
    monkeypatch.setattr(module, "get_rng_state", lambda device: devices[device].get_state())
    monkeypatch.setattr(module, "set_rng_state", lambda s, device: devices[device].set_state(s))
    monkeypatch.setattr(module, "current_device", lambda: 0, raising=False)
    state = rng.capture()
    expected = [torch.rand(3, generator=one).tolist() for one in devices]
    rng.restore(state)
    assert [torch.rand(3, generator=one).tolist() for one in devices] == expected


def test_every_generator_comes_back_to_the_bit():
    """Half a pair of Gaussians may be waiting in any of the three."""
    numpy = pytest.importorskip("numpy")

    def draws():
        return (
            [random.gauss(0, 1), random.random(), random.getrandbits(99)],
            torch.randn(3).tolist() + torch.rand(20).tolist(),
            [numpy.random.normal(), *numpy.random.rand(3), numpy.random.randint(99)],
        )

    draws()
    for _ in range(3):  # at even and at odd places in the pairs
        random.gauss(0, 1)
        numpy.random.normal()
        torch.randn(1)
        state = rng.capture()
        expected = draws()
        assert draws() != expected
        rng.restore(state)
        assert draws() == expected
