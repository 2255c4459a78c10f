"""Each rank sees a part of the gradients, and all do the same by what all see."""

import json
import math

import pytest
from ranked import RankedJob


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """By rank, what it says of each case."""
    directory = tmp_path_factory.mktemp("norms")
    job = RankedJob(directory, 2, script="norms.py")
    assert job.run() == [0, 0], job.output
    return [json.loads((directory / f"told_{rank}.json").read_text()) for rank in range(2)]


def test_the_norm_is_that_of_all_shards_and_of_what_is_not_sharded(said):
    """Frozen parameters, an empty shard, and a plain parameter beside them."""
    for one in said:
        problem, _, norm, expected = one["good"]
        assert not problem
        assert norm == said[0]["good"][2] == pytest.approx(expected, rel=1e-6)


def test_a_nan_in_one_shard_is_named_by_its_rank_and_bad_on_all(said):
    """A rank that went on would update its shards alone."""
    first, second = (one["NaN in a shard"][0] for one in said)
    assert first == "on rank 1"
    assert second == "the gradient of model.0.weight (1 NaN, 0 Inf of 5)"


def test_squares_that_overflow_in_one_shard_are_no_nan(said):
    """The exact norm is found out by all ranks together, or one would wait for the others."""
    for one in said:
        problem, _, norm, _ = one["overflow in a shard"]
        assert not problem
        assert norm == pytest.approx(1e30, rel=1e-6)
        assert one["overflow in a shard, clipped"] == pytest.approx(0.5, rel=1e-4)
        assert one["good, clipped"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    "case", ["bad loss", "bad loss and NaN in another's shard", "overflow and a bad loss"]
)
def test_a_bad_loss_on_one_rank_counts_before_all_else(case, said):
    """That rank looks no further, so the others must not wait for it."""
    assert said[0][case][0] == "the loss is nan"
    assert said[1][case][0]
    assert [one[case][1] for one in said] == [True, True]


def test_clipping_goes_by_the_norm_of_all(said):
    """A step of SGD with rate 1 moves the parameters by the norm that they were clipped to."""
    for one in said:
        assert one["updated"]
        assert one["moved by"] == pytest.approx(0.5, rel=1e-4)
        assert math.isfinite(one["good"][2])
