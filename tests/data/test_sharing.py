"""Positions in a loader that ranks share, loaded by another number of ranks."""

import copy
import itertools

import pytest
import torch
from number_datasets import Numbers, Stream
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from forge.data import GlobalBatchSampler, seeded
from forge.data.position import Position
from forge.errors import ConfigError, StateMismatch
from forge.group import collectives
from forge.state import rng

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
@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (1, 4), (4, 1), (3, 2), (2, 6)])
def test_another_number_of_ranks_continues_after_the_same_sample(kind, old, new, job):
    """The rest of the epoch has each sample once, and the next epoch is the undisturbed one."""
    make = KINDS[kind]
    before = job(make, old, batch=12 // old, seed=3)
    for position in before:
        for _ in range(5):
            position.next()
    seen = [step(before)]
    after = moved(before, job(make, new, batch=12 // new, seed=3))
    whole = job(make, new, batch=12 // new, seed=3)
    undisturbed = [step(whole) for _ in range(12)]
    assert seen + [step(after) for _ in range(6)] == undisturbed[5:]
    assert sorted(itertools.chain(*undisturbed[4:8])) == list(range(SAMPLES))
    assert all(one.epoch == 2 for one in after)


@pytest.mark.parametrize("kind", KINDS)
def test_another_batch_size_continues_after_the_same_sample_where_one_begins(kind, job):
    """The position in an epoch is counted in samples."""
    make = KINDS[kind]
    before = job(make, 2, batch=4)
    seen = [step(before) for _ in range(3)]
    after = moved(before, job(make, 2, batch=12))
    seen.append(step(after))
    assert sorted(itertools.chain(*seen)) == list(range(SAMPLES))
    with pytest.raises(
        StateMismatch,
        match=r"after 24 samples .* not a multiple of the present global batch size, 5",
    ):
        moved(before, job(make, 5, batch=1))


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
        position.cut()
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
@pytest.mark.parametrize("is_persistent", [False, True])
def test_an_interruption_after_the_change_changes_nothing_more(is_persistent, job):
    """The next save has a position of the new ranks, whose workers have their own draws."""
    options = {"num_workers": 1, "persistent_workers": is_persistent}

    def drawing(size, rank):
        generator = torch.Generator().manual_seed(2)
        loader = dealt(size, rank, 12 // size, generator=generator, **options)
        loader.dataset.draws = True
        return loader

    before = job(drawing, 4)
    seen = [step(before) for _ in range(6)][4:]  # in the second epoch
    after = moved(before, job(drawing, 2))
    states = [copy.deepcopy(one.state()) for one in after]
    kept = rng.capture()
    expected = [one.next().tolist() for one in after]
    rng.restore(kept)
    seen += [sorted(int(one) for one in expected[0] + expected[1]), step(after)]
    assert sorted(itertools.chain(*seen)) == list(range(SAMPLES))
    assert expected[0][0] % 1 != expected[1][0] % 1, "the workers of both ranks drew the same"
    again = job(drawing, 2)
    for position, state in zip(again, states, strict=True):
        position.load(state)
    assert [one.next().tolist() for one in again] == expected


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


def test_seeded_samples_are_the_same_on_any_number_of_ranks(job):
    """With DataLoader workers, too."""

    def augmented(size, rank):
        data = seeded(Numbers(SAMPLES, draws=True), 1)
        sampler = GlobalBatchSampler(data, 12, num_replicas=size, rank=rank)
        return DataLoader(data, batch_sampler=sampler, num_workers=1)

    whole = job(augmented, 1)
    undisturbed = [whole[0].next() for _ in range(3)]
    before = job(augmented, 3)
    for position in before:
        for _ in range(2):
            position.next()
    after = moved(before, job(augmented, 2))
    assert torch.equal(torch.cat([one.next() for one in after]), undisturbed[2])


class Deals(BatchSampler):
    def __iter__(self):
        return super().__iter__()


class Own(DataLoader):
    def __iter__(self):
        return super().__iter__()


def unknown(name):
    data = Numbers(SAMPLES)
    return {
        "RandomSampler": lambda size, rank: DataLoader(data, batch_size=4, shuffle=True),
        "Stream": lambda size, rank: DataLoader(Stream(), batch_size=2),
        "StatefulDataLoader": lambda size, rank: StatefulDataLoader(data, batch_size=4),
        "list": lambda size, rank: list(range(6)),
        "Deals": lambda size, rank: DataLoader(
            data, batch_sampler=Deals(DistributedSampler(data, size, rank), 4, False)
        ),
        "Own": lambda size, rank: Own(data, sampler=DistributedSampler(data, size, rank)),
    }[name]


@pytest.mark.parametrize(
    "name", ["RandomSampler", "Stream", "StatefulDataLoader", "list", "Deals", "Own"]
)
def test_a_loader_of_unknown_order_is_refused_inside_an_epoch(name, job):
    """The error names it, and loaders that can; the same number of ranks resumes as before."""
    make = unknown(name)
    before = job(make, 4)
    for position in before:
        position.next()
    with pytest.raises(StateMismatch) as caught:
        moved(before, job(make, 2))
    for words in (name, "saved by 4 ranks", "this job has 2 ranks", "GlobalBatchSampler"):
        assert words in str(caught.value)
    moved(before, job(make, 4))


@pytest.mark.parametrize("name", ["RandomSampler", "Stream", "StatefulDataLoader", "list"])
def test_between_two_epochs_any_loader_can_be_taken_up(name, job):
    """The new ranks begin the epoch, since none of its batches was read."""
    make = unknown(name)
    after = moved(job(make, 4), job(make, 2))
    assert all(one.next() is not None for one in after)


def test_at_the_end_of_an_epoch_a_plain_loader_can_be_taken_up(job):
    """All ranks end an epoch together; a loader with a generator of one rank is refused."""

    def drawn(size, rank):
        generator = torch.Generator().manual_seed(rank)
        return DataLoader(Numbers(8), batch_size=4, shuffle=True, generator=generator)

    for make, is_refused in [(unknown("RandomSampler"), False), (drawn, True)]:
        before = job(make, 4)
        for position in before:
            for _ in range(len(position._loader)):
                position.next()
        after = job(make, 2)
        if is_refused:
            with pytest.raises(StateMismatch, match="RandomSampler"):
                moved(before, after)
        else:
            moved(before, after)[1].next()
            assert after[1].epoch == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 4}, "the sampler's seed was 3 when .* is 4 now"),
        ({"shuffle": False}, "the sampler's shuffle was True when .* is False now"),
        ({"num_samples": 60}, "the length of its dataset was 48 when .* is 60 now"),
    ],
    ids=["seed", "shuffle", "length"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_another_order_inside_an_epoch_is_refused_on_any_number_of_ranks(kind, options, words, job):
    """Otherwise the rest of the epoch would silently repeat samples."""
    make = KINDS[kind]
    before = job(make, 2, seed=3)
    step(before)
    for size in (2, 3):
        with pytest.raises(StateMismatch, match=words):
            moved(before, job(make, size, **({"seed": 3} | options)))
    between = job(make, 2, seed=3)
    moved(between, job(make, 3, **({"seed": 3} | options)))


def test_another_sampler_inside_an_epoch_is_refused(job):
    """A sampler of another kind cannot continue the epoch, nor can one without ranks."""
    before = job(dealt, 2)
    step(before)
    with pytest.raises(
        StateMismatch, match=r"the sampler was 'DistributedSampler' when .* is 'Global"
    ):
        moved(before, job(cut, 2))
    with pytest.raises(
        ConfigError, match="sampler was 'DistributedSampler' and is 'RandomSampler'"
    ):
        moved(before, job(unknown("RandomSampler"), 2))


def test_a_checkpoint_that_says_nothing_of_ranks_can_be_loaded(job):
    """A version of forge saved it that did not support another number of ranks."""
    before = job(dealt, 1)
    before[0].next()
    state = before[0].state()
    del state["sharing"]
    expected = before[0].next().tolist()
    (after,) = job(dealt, 1)
    after.load(state)
    assert after.next().tolist() == expected
