"""One order of samples, however many ranks share it."""

import itertools

import pytest
import torch
from forked import completed
from number_datasets import Numbers
from torch.utils.data import DataLoader, DistributedSampler

from forge.data import GlobalBatchSampler
from forge.errors import ConfigError

SIZES = [1, 2, 3, 4, 6]


def shared(num_samples, batch, size, epoch=0, **options):
    """The batches of each rank, from samplers as each of them makes one."""
    samplers = [
        GlobalBatchSampler(range(num_samples), batch, num_replicas=size, rank=rank, **options)
        for rank in range(size)
    ]
    for one in samplers:
        one.set_epoch(epoch)
    return [list(one) for one in samplers]


def together(ranks):
    """What all ranks have of each batch, one after the other."""
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"seed": None}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_ranks_put_side_by_side_have_what_one_rank_has(size, options):
    """The global batch is what a loss curve depends on: its order, too, is no matter of ranks."""
    for num_samples, epoch in [(96, 0), (100, 3), (7, 1)]:
        (alone,) = shared(num_samples, 12, 1, epoch, **options)
        ranks = shared(num_samples, 12, size, epoch, **options)
        assert together(ranks) == alone
        assert {len(batch) for rank in ranks for batch in rank} <= {12 // size}


@pytest.mark.parametrize("size", SIZES)
def test_an_uneven_end_is_filled_up_or_left_out_alike_on_every_rank(size):
    """A rank with a batch more than the others would wait for them for good."""
    filled = together(shared(100, 12, size))
    order = list(itertools.chain(*filled))
    assert sorted(order[:100]) == list(range(100))
    assert order[100:] == order[:8]
    assert together(shared(100, 12, size, drop_last=True)) == filled[:-1]
    for drop_last, expected in [(False, 9), (True, 8)]:
        sampler = GlobalBatchSampler(
            range(100), 12, drop_last=drop_last, num_replicas=size, rank=size - 1
        )
        assert len(sampler) == len(list(sampler)) == expected


def test_fewer_samples_than_a_batch_are_repeated():
    """As often as it takes, on all ranks alike."""
    (batch,) = together(shared(3, 8, 2, seed=None))
    assert batch == [0, 1, 2, 0, 1, 2, 0, 1]
    assert together(shared(3, 8, 2, drop_last=True)) == together(shared(0, 8, 2)) == []


def test_the_samples_of_a_step_are_those_of_a_distributed_sampler():
    """A script that changes from one to the other keeps its batches, as sets."""
    dealt = [DistributedSampler(range(48), 3, rank, seed=5) for rank in range(3)]
    for epoch in range(3):
        for one in dealt:
            one.set_epoch(epoch)
        order = list(itertools.chain(*zip(*dealt, strict=True)))
        ours = together(shared(48, 12, 3, epoch, seed=5))
        for k, batch in enumerate(ours):
            assert sorted(batch) == sorted(order[12 * k : 12 * k + 12])
    assert together(shared(48, 12, 3, 0)) != together(shared(48, 12, 3, 1))
    assert together(shared(48, 12, 3, seed=0)) != together(shared(48, 12, 3, seed=1))


def test_the_order_takes_nothing_from_the_process_it_is_in():
    """Neither its random state, nor torch's default device."""
    (before,) = shared(20, 4, 1)
    state = torch.get_rng_state()
    with torch.device("meta"):
        (after,) = shared(20, 4, 1)
    assert after == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_takes_it_as_its_batch_sampler():
    """With its length, and a part of each batch."""
    sampler = GlobalBatchSampler(range(20), 8, seed=None, num_replicas=2, rank=1)
    loader = DataLoader(Numbers(20), batch_sampler=sampler)
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [12, 13, 14, 15], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 3, "rank": 0}, "global_batch_size=8 is not a positive multiple"),
        ({"num_replicas": 2, "rank": 2}, "rank=2 is not below num_replicas=2"),
        ({"rank": 1}, "Pass both arguments or none"),
    ],
    ids=["uneven", "no such rank", "half"],
)
def test_what_cannot_be_shared_equally_is_refused(options, words):
    """By name, before the first batch."""
    with pytest.raises(ConfigError, match=words):
        GlobalBatchSampler(range(20), 8, **options)


def test_ranks_that_do_not_know_each_other_are_refused(tmp_path):
    """Each would take the whole batch, as if it were alone."""
    script = "import forge; forge.data.GlobalBatchSampler(range(8), 4)"
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = completed(["-c", script], tmp_path, joins_output=False, **env)
    assert found.returncode == 1
    assert "call forge.distributed.init() before the sampler is made" in found.stderr
