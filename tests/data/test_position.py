"""Positions in every kind of loader, in one process."""

import copy
import multiprocessing
import random

import numpy as np
import pytest
import torch
from number_datasets import Numbers, Stream
from rows import few
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import forge
from forge.data import seeding
from forge.data.loaders import doubts
from forge.data.position import Position
from forge.errors import ConfigError, StateMismatch
from forge.state import rng

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class DrawsAsItGoes:
    """A sampler that draws each index from the global generator when the index is requested."""

    def __len__(self):
        return 6

    def __iter__(self):
        for _ in range(6):
            yield int(torch.randint(100, ()))


class LateOrder(DrawsAsItGoes):
    """Draws from its own generator, which forge can find."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self):
        for _ in range(6):
            yield int(torch.randint(100, (), generator=self.generator))


class ShufflesInPlace:
    """A batch sampler that shuffles the order of the last epoch; its state is the live list."""

    exact = True

    def __init__(self):
        self.order = list(range(12))

    def __len__(self):
        return 3

    def __iter__(self):
        random.shuffle(self.order)
        for i in range(0, 12, 4):
            yield self.order[i : i + 4]

    def state_dict(self):
        return {"order": self.order}

    def load_state_dict(self, state):
        self.order = state["order"]


class Moving(DataLoader):
    """Converts each batch, as loaders for a device commonly do."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch.double()


class Wrapping(DataLoader):
    """Wraps the iterator itself."""

    def _get_iterator(self):
        return map(torch.Tensor.double, super()._get_iterator())


class Delaying(DataLoader):
    """Makes the iterator when the first batch is requested."""

    def _get_iterator(self):
        yield from super()._get_iterator()


class Infinite(DataLoader):
    """Uses one iterator, and its workers, forever, like a loader of Ultralytics."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeats(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Repeats:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


def loaders():
    numbers = Numbers(100)
    seeded = seeding.seeded(Numbers(10, draws=True), 1)
    generator = torch.Generator()
    return {
        "in order": lambda: DataLoader(numbers, batch_size=12),
        "shuffled": lambda: DataLoader(numbers, batch_size=12, shuffle=True),
        "drop_last": lambda: DataLoader(numbers, batch_size=12, shuffle=True, drop_last=True),
        "no batches": lambda: DataLoader(Numbers(5), batch_size=None, shuffle=True),
        "generator": lambda: DataLoader(
            Numbers(6), shuffle=True, generator=generator.manual_seed(4)
        ),
        "weighted": lambda: DataLoader(
            numbers, batch_size=3, sampler=WeightedRandomSampler(torch.ones(100), 20)
        ),
        "drawing sampler": lambda: DataLoader(numbers, sampler=DrawsAsItGoes()),
        "batch sampler": lambda: DataLoader(
            numbers, batch_sampler=BatchSampler(DrawsAsItGoes(), 2, False)
        ),
        "late order": lambda: DataLoader(numbers, sampler=LateOrder()),
        "shuffles in place": lambda: DataLoader(numbers, batch_sampler=ShufflesInPlace()),
        "own __iter__": lambda: Moving(numbers, batch_size=12, shuffle=True),
        "own iterator": lambda: Wrapping(numbers, batch_size=12, shuffle=True),
        "late iterator": lambda: Delaying(numbers, batch_size=12, shuffle=True),
        "infinite": lambda: Infinite(Numbers(40), batch_size=9, shuffle=True),
        "stream": lambda: DataLoader(Stream(), batch_size=2),
        "stateful": lambda: StatefulDataLoader(numbers, batch_size=12, shuffle=True),
        "seeded": lambda: DataLoader(seeded, batch_size=3, shuffle=True),
        "list": lambda: [torch.tensor(i) for i in range(5)],
        "python's shuffle": lambda: Shuffled(),
    }


class Shuffled:
    def __iter__(self):
        order = list(range(5))
        random.shuffle(order)
        return iter(torch.tensor(order))


def drawn(position, count):
    """Batches, with random draws of the training loop between them."""
    return [(position.next().tolist(), torch.rand(1).item(), random.random()) for _ in range(count)]


def seed():
    torch.manual_seed(3)
    random.seed(3)


@pytest.mark.parametrize("taken", few(6, [0, 1, 4, 5, 6, 10, 7, 9, 11, 14]))
@pytest.mark.parametrize("name", loaders())
def test_what_comes_after_a_resume_is_what_would_have_come(name, taken):
    """Batches and draws of two more epochs, after a stop before, at or after an epoch's end."""
    seed()
    original = Position(loaders()[name]())
    drawn(original, taken)
    saved, random_state = copy.deepcopy(original.state()), copy.deepcopy(rng.capture())
    expected = drawn(original, 16)
    seed()
    resumed = Position(loaders()[name]())  # built as always: some loaders draw random numbers here
    torch.rand(5)
    random.random()
    resumed.load(saved)
    rng.restore(random_state)
    assert drawn(resumed, 16) == expected
    assert resumed.state()["epoch"] == original.state()["epoch"]
    assert resumed.state()["taken"] == original.state()["taken"]


@pytest.mark.parametrize("place", ["within", "between", "another", "read before"])
@pytest.mark.parametrize("make", [DataLoader, Moving])
def test_persistent_workers_get_the_order_of_their_epoch(make, place):
    """Only the pass that starts the workers draws a seed for them, before the order is drawn.

    A loop ends within a pass or between two, makes another loader for its second pass, or the
    script has read the loader before.
    """

    def loader():
        options = {"multiprocessing_context": "fork", "persistent_workers": True}
        return make(Numbers(9), batch_size=2, shuffle=True, num_workers=1, **options)

    def built():
        made = loader()
        if place == "read before":
            next(iter(made))
        return made

    seed()
    given = built()
    original = Position(given)
    drawn(original, {"within": 7, "between": 5, "another": 5, "read before": 2}[place])
    if place in ("between", "another"):
        original.next_of_pass()
        assert original.is_over
        again = Position(loader() if place == "another" else given)
        again.follow(original)
        again.epoch = 1
    if place == "another":
        original = again
        drawn(original, 2)
    saved, random_state = copy.deepcopy(original.state()), copy.deepcopy(rng.capture())
    expected = drawn(again if place == "between" else original, 3)
    resumed = Position(built())
    if place == "between":
        resumed.load_finished(saved)
        resumed.epoch = 1
    else:
        resumed.load(saved)
    rng.restore(random_state)
    assert drawn(resumed, 3) == expected


class Prepared(DataLoader):
    """Reads another loader, whose attributes it shows, as Accelerate's do."""

    def __init__(self, loader):
        self.__dict__["base_dataloader"] = loader

    def __getattr__(self, name):
        return getattr(self.base_dataloader, name)

    def __setattr__(self, name, value):
        self.__dict__[name] = value


def test_a_loader_that_reads_another_gets_no_workers_of_its_own():
    """They would read the same batches, and nobody would take them."""
    options = {"multiprocessing_context": "fork", "persistent_workers": True, "num_workers": 1}
    given = Prepared(DataLoader(Numbers(9), **options))
    state = Position(given).state()
    Position(given).load_finished({**state, "has_workers": True})
    assert not multiprocessing.active_children()


def test_batches_that_were_taken_are_not_read_again():
    """Reading a million samples in order to skip them would take hours."""
    first = Position(DataLoader(Numbers(100), batch_size=10))
    drawn(first, 7)
    numbers = Numbers(100)
    position = Position(DataLoader(numbers, batch_size=10))
    position.load(first.state())
    assert numbers.read == []
    assert position.next().tolist() == list(range(70, 80))
    assert numbers.read == list(range(70, 80))


def test_what_was_left_out_once_is_not_left_out_of_the_next_epoch():
    """After the epoch of the resume the loader has its own sampler again."""
    first = Position(DataLoader(Numbers(6), batch_size=2))
    drawn(first, 2)
    loader = DataLoader(Numbers(6), batch_size=2)
    sampler = loader.batch_sampler
    position = Position(loader)
    position.load(first.state())
    assert [position.next().tolist() for _ in range(4)] == [[4, 5], [0, 1], [2, 3], [4, 5]]
    assert loader.batch_sampler is sampler
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_became_shorter_is_named_with_both_numbers(workers):
    """Continuing at some other sample would silently train on other data."""
    first = Position(DataLoader(Numbers(100), batch_size=10))
    drawn(first, 7)
    options = {"multiprocessing_context": "fork"} if workers else {}
    shorter = DataLoader(Numbers(50), batch_size=10, num_workers=workers, **options)
    with pytest.raises(ConfigError, match=r"after 7 .* its dataset was 100 and is 50"):
        Position(shorter).load(first.state())


def test_a_loader_of_another_kind_is_named():
    """The state of a StatefulDataLoader means nothing to a plain DataLoader."""
    first = Position(StatefulDataLoader(Numbers(4)))
    first.next()
    with pytest.raises(
        ConfigError, match="whether it restores its place itself was True and is False"
    ):
        Position(DataLoader(Numbers(4))).load(first.state())


def test_a_generator_that_is_gone_is_named():
    """Without the generator forge cannot repeat the order of the epoch."""
    first = Position(DataLoader(Numbers(4), shuffle=True, generator=torch.Generator()))
    first.next()
    with pytest.raises(StateMismatch, match=r"but the loader has no loader\.generator now"):
        Position(DataLoader(Numbers(4), shuffle=True)).load(first.state())


EMPTY = {"list": [], "no data": DataLoader([]), "drop_last": DataLoader([1], 2, drop_last=True)}


@pytest.mark.parametrize("loader", EMPTY.values(), ids=EMPTY)
def test_an_empty_loader_is_an_error_and_no_endless_loop(loader):
    """An endless series of epochs without batches would hang the job at full speed."""
    with pytest.raises(ValueError, match="yielded no batch in epoch 0"):
        Position(loader).next()


def test_an_iterator_that_ends_says_what_to_pass_instead():
    """`iter(loader)` is a common way to write it, but an iterator has no second epoch."""
    position = Position(iter([1, 2]))
    assert [position.next(), position.next()] == [1, 2]
    with pytest.raises(ValueError, match=r"ended after 2 batches. It is an iterator"):
        position.next()


def test_epochs_are_announced_to_samplers_and_seeded_datasets():
    """Half of all training scripts forget to call `set_epoch`."""
    numbers = seeding.seeded(Numbers(8), 1)
    sampler = DistributedSampler(numbers, num_replicas=2, rank=0)
    position = Position(DataLoader(numbers, batch_size=2, sampler=sampler))
    for epoch in (0, 0, 1, 1, 2):
        position.next()
        assert (sampler.epoch, numbers.epoch, position.epoch) == (epoch,) * 3
    other_data = seeding.seeded(Numbers(8), 1)
    other = DistributedSampler(other_data, num_replicas=2, rank=0)
    resumed = Position(DataLoader(other_data, batch_size=2, sampler=other))
    resumed.load(position.state())
    assert (other.epoch, other_data.epoch) == (2, 2)


def test_a_loop_that_has_ended_leaves_its_generator_to_the_next_one():
    """Warm-up and training can share a loader: training continues with the generator of warm-up."""

    def loader():
        return DataLoader(Numbers(9), shuffle=True, generator=torch.Generator().manual_seed(1))

    shared = loader()
    first = Position(shared)
    drawn(first, 4)
    saved = copy.deepcopy(first.state())
    expected = [b.tolist() for b, *_ in zip(Position(shared)._loader, range(9), strict=True)]
    again = loader()
    Position(again).load_finished(saved)
    assert [b.tolist() for b in again] == expected


def sentences(loader):
    return " ".join(doubts(loader))


class Jitter:
    def __init__(self):
        self.rng = random.Random(1)


def test_a_generator_that_seeded_does_not_reach_is_named_and_not_told_to_be_wrapped(caplog):
    """The dataset is wrapped in `seeded` already, so the advice to wrap it would not help."""
    numbers = Numbers(4)
    numbers.settings = {"transforms": [Jitter()], "global": np.random.mtrand._rand}
    with caplog.at_level("WARNING", "forge"):
        seeded = seeding.seeded(numbers, 1)
    name = "Numbers.settings['transforms'][0].rng"
    (record,) = caplog.records
    assert f"does not seed your own random generators ({name}), " in record.getMessage()
    assert "global generators" in record.getMessage()
    workers = {"num_workers": 2}
    for loader in (
        StatefulDataLoader(seeded, **workers),
        DataLoader(seeded, persistent_workers=True, **workers),
    ):
        assert f"does not seed your own random generators ({name}). " in sentences(loader)
        assert "Wrap the dataset" not in sentences(loader)
    assert f"the random generator of the Numbers ({name})" in sentences(DataLoader(seeded))
    bare = sentences(StatefulDataLoader(numbers, **workers))
    assert "Wrap the dataset in forge.data.seeded. forge.data.seeded does not seed" in bare
    assert "does not seed" not in sentences(StatefulDataLoader(Numbers(4), **workers))


class Hard:
    """Draws what the loop finds hard more often: the loop changes it in mid-epoch."""

    def __init__(self):
        self.weights = torch.ones(12)

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(torch.multinomial(self.weights, 12, replacement=True).tolist())

    exact = True

    def state_dict(self):
        return {"weights": self.weights.clone()}

    def load_state_dict(self, state):
        self.weights = state["weights"].clone()


def test_what_the_loop_has_changed_in_the_sampler_since_the_epoch_began_is_kept(tmp_path):
    """The order of the epoch is drawn again from what it was; the next one from what is now."""

    def part(directory, stop_at):
        torch.manual_seed(0)
        sampler, seen = Hard(), []
        policy = {"checkpoint": {"dir": str(directory), "every_steps": 1}}
        with forge.Run(policy, model=torch.nn.Linear(1, 1)) as run:
            for step, batch in run.steps(12, DataLoader(range(12), 3, sampler=sampler)):
                if step == stop_at:
                    raise RuntimeError("stopped here")
                sampler.weights[batch] *= 1.5
                seen.append((batch.tolist(), sampler.weights.tolist()))
        return seen

    undisturbed = part(tmp_path / "undisturbed", None)
    with pytest.raises(RuntimeError, match="stopped here"):
        part(tmp_path / "job", 6)
    assert part(tmp_path / "job", None) == undisturbed[6:]


def test_what_cannot_be_exact_is_named_and_nothing_else_is():
    """Users ignore a warning that always appears."""
    numbers, seeded = Numbers(4), seeding.seeded(Numbers(4), 1)
    workers = {"num_workers": 2}
    weighted = WeightedRandomSampler(torch.ones(4), 4)
    shared = DistributedSampler(numbers, num_replicas=2, rank=0)
    for exact in (
        *(DataLoader(numbers), DataLoader(numbers, **workers), StatefulDataLoader(numbers), [1]),
        StatefulDataLoader(seeded, **workers),
        DataLoader(Subset(seeded, [0]), persistent_workers=True, **workers),
        DataLoader(ConcatDataset([seeded, seeded]), persistent_workers=True, **workers),
        *(DataLoader(numbers, sampler=one) for one in (weighted, shared, LateOrder(), [3, 1])),
        DataLoader(numbers, shuffle=True, batch_size=None),
        DataLoader(numbers, batch_sampler=BatchSampler(weighted, 2, False)),
        DataLoader(numbers, batch_sampler=ShufflesInPlace()),
        Shuffled(),
    ):
        assert sentences(exact) == "", exact
    stateful = StatefulDataLoader(numbers, **workers)
    assert "random draws in the 2 workers of the StatefulDataLoader. Wrap" in sentences(stateful)
    persistent = DataLoader(numbers, persistent_workers=True, **workers)
    assert "random draws in the 2 workers of the DataLoader. Wrap" in sentences(persistent)
    assert "a DataLoader over samples of a Stream: use torchdata's" in sentences(
        DataLoader(Stream())
    )
    assert "a Moving: give it a state_dict" in sentences(Moving(numbers))
    assert "a list_iterator: give it a state_dict" in sentences(iter([1]))
    for unknown in (
        DataLoader(numbers, sampler=DrawsAsItGoes()),
        DataLoader(numbers, batch_sampler=BatchSampler(DrawsAsItGoes(), 2, False)),
        StatefulDataLoader(numbers, sampler=DrawsAsItGoes()),
    ):
        assert "the order of a DrawsAsItGoes: give it set_epoch(epoch)" in sentences(unknown)
    assert "in_order=False: leave that out" in sentences(
        DataLoader(seeded, in_order=False, **workers)
    )
