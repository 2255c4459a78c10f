"""Positions in a loader that ranks share; another number of ranks begins with the next epoch."""

import copy

import pytest
import torch
from number_datasets import Numbers, Stream
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from forge.data import GlobalBatchSampler, seeded
from forge.data.position import Position
from forge.errors import ConfigError
from forge.group import collectives

SAMPLES = 48
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def dealt(size, rank, batch=4, num_samples=SAMPLES, **options):
    """A loader with a `DistributedSampler`; `batch` is the batch size of one rank."""
    own = {name: options.pop(name) for name in ("seed", "shuffle", "drop_last") if name in options}
    data = Numbers(num_samples)
    sampler = DistributedSampler(data, size, rank, **own)
    return DataLoader(data, batch_size=batch, sampler=sampler, **options)


def cut(size, rank, batch=4, num_samples=SAMPLES, **options):
    """A loader with a `GlobalBatchSampler`; `batch` is the batch size of one rank."""
    if not options.pop("shuffle", True):
        options["seed"] = None
    sampler = GlobalBatchSampler(
        range(num_samples), batch * size, num_replicas=size, rank=rank, **options
    )
    return DataLoader(Numbers(num_samples), batch_sampler=sampler)


KINDS = {"DistributedSampler": dealt, "GlobalBatchSampler": cut}


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process one rank of several, without `torch.distributed`."""

    def become(rank, size):
        monkeypatch.setattr(collectives, "rank_and_size", lambda: (rank, size))

    return become


@pytest.fixture
def job(as_rank):
    """Makes the positions of all ranks."""

    def made(make, size, **options):
        positions = []
        for rank in range(size):
            as_rank(rank, size)
            positions.append(Position(make(size, rank, **options)))
        return positions

    return made


def step(positions):
    """The samples in the next batch of all ranks together."""
    return sorted(int(one) for position in positions for one in position.next().tolist())


def moved(before, after):
    """Load the state of rank 0 of `before` on all ranks of `after`."""
    state = before[0].state()
    for position in after:
        position.load(copy.deepcopy(state))
    return after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_end_of_an_epoch_is_its_end_for_any_number_of_ranks(kind, drop_last, job):
    """With padding or `drop_last`, the samples in an epoch depend on the number of ranks."""
    make, options = KINDS[kind], {"num_samples": 50, "drop_last": drop_last}
    before = job(make, 4, **options)
    num_batches = len(before[0]._loader)
    for _ in range(num_batches):
        step(before)
    after, whole = moved(before, job(make, 3, **options)), job(make, 3, **options)
    for position in whole:
        position.epoch += 1
    assert step(after) == step(whole)
    assert all(one.epoch == 1 for one in after)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_of_ranks_keeps_the_place_of_each(kind, job):
    """Each rank loads its own state, and continues with the same batches."""
    make = KINDS[kind]
    before = job(make, 3)
    step(before)
    states = [copy.deepcopy(one.state()) for one in before]
    expected = [one.next().tolist() for one in before]
    after = job(make, 3)
    for position, state in zip(after, states, strict=True):
        position.load(state)
    assert [one.next().tolist() for one in after] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_later_epoch_of_persistent_workers_keeps_its_order(kind, is_seeded, job):
    """A resume starts the workers as in a first epoch, and only a first epoch draws their seed."""

    def persistent(size, rank):
        loader = KINDS[kind](size, rank)
        data = seeded(loader.dataset, 1) if is_seeded else loader.dataset
        options = {"num_workers": 1, "persistent_workers": True}
        if kind == "GlobalBatchSampler":
            return DataLoader(data, batch_sampler=loader.batch_sampler, **options)
        return DataLoader(data, batch_size=4, sampler=loader.sampler, **options)

    (before,) = job(persistent, 1)
    for _ in range(SAMPLES // 4 + 2):
        before.next()
    state = copy.deepcopy(before.state())
    expected = [before.next().tolist() for _ in range(2)]
    (after,) = job(persistent, 1)
    after.load(state)
    assert [after.next().tolist() for _ in range(2)] == expected


def unknown(name):
    data = Numbers(SAMPLES)
    return {
        "RandomSampler": lambda size, rank: DataLoader(data, batch_size=4, shuffle=True),
        "Stream": lambda size, rank: DataLoader(Stream(), batch_size=2),
        "StatefulDataLoader": lambda size, rank: StatefulDataLoader(data, batch_size=4),
        "list": lambda size, rank: list(range(6)),
    }[name]


UNKNOWN = ["RandomSampler", "Stream", "StatefulDataLoader", "list"]


@pytest.mark.parametrize("name", [*KINDS, *UNKNOWN])
def test_another_number_of_ranks_is_refused_inside_an_epoch(name, job):
    """The rest of the epoch would have other samples; the same number of ranks resumes."""
    make = KINDS.get(name) or unknown(name)
    before = job(make, 4)
    for position in before:
        position.next()
    with pytest.raises(ConfigError, match="the number of ranks was 4 and is 2"):
        moved(before, job(make, 2))
    moved(before, job(make, 4))


@pytest.mark.parametrize("name", UNKNOWN)
def test_between_two_epochs_any_loader_can_be_taken_up(name, job, caplog):
    """The new ranks begin the epoch, since none of its batches was read."""
    make = unknown(name)
    with caplog.at_level("WARNING", "forge"):
        after = moved(job(make, 4), job(make, 2))
    assert all(one.next() is not None for one in after)
    assert "the number of ranks was 4 and is 2" in caplog.messages[0]


def test_at_the_end_of_an_epoch_a_plain_loader_can_be_taken_up(job):
    """All ranks end an epoch together; each of the new ones has its own generator."""

    def drawn(size, rank):
        generator = torch.Generator().manual_seed(rank)
        return DataLoader(Numbers(8), batch_size=4, shuffle=True, generator=generator)

    for make in (unknown("RandomSampler"), drawn):
        before = job(make, 4)
        for position in before:
            for _ in range(len(position._loader)):
                position.next()
        after = moved(before, job(make, 2))
        states = [copy.deepcopy(one.state()) for one in after]
        assert [one.next() is not None for one in after] == [True, True]
        assert all(one.epoch == 1 for one in after)
        again = job(make, 2)
        for position, state in zip(again, states, strict=True):
            position.load(state)
        assert [one.next() is not None for one in again] == [True, True]
        assert all(one.epoch == 1 for one in again)
