"""Ranks stop at the same boundary, whichever of them is signalled, and whatever they are doing."""

import json

import pytest
from ranked import RankedJob

from forge.group.ranks import MARGIN

STOPS = {"one": [[1, 30]], "the first": [[0, 30]], "all": [[r, 30] for r in range(3)]}


@pytest.mark.parametrize("has_collective", [True, False], ids=["in step", "apart"])
@pytest.mark.parametrize("who", STOPS)
def test_all_stop_at_the_same_boundary(who, has_collective, tmp_path):
    """One that goes on alone would hang; none is asked to stop at a boundary it has passed."""
    job = RankedJob(
        tmp_path, 3, "agreeing.py", seed=1, stops=STOPS[who], has_collective=has_collective
    )
    assert job.run() == [0, 0, 0], job.output
    for found in job.printed:
        stopped = {boundary for boundary, _ in json.loads(found[0])}
        assert len(stopped) == 1
        assert stopped.pop() > 30


@pytest.mark.parametrize("who", STOPS)
def test_a_stop_comes_after_as_many_steps_however_slow_the_store_is(who, tmp_path):
    """The rank that asks waits for the answers; who counts with a time limit, counts with that."""
    spec = {"stops": STOPS[who], "has_collective": True, "slow_s": 0.2}
    job = RankedJob(tmp_path, 3, "agreeing.py", seed=4, **spec)
    assert job.run() == [0, 0, 0], job.output
    for found in job.printed:
        assert {boundary <= 30 + 2 + MARGIN for boundary, _ in json.loads(found[0])} == {True}


def test_what_was_proposed_at_different_times_is_agreed_on_in_one_order(tmp_path):
    """A save that only some ranks make is no checkpoint."""
    saves = [[0, 9], [1, 10], [2, 11], [1, 40]]
    spec = {"saves": saves, "stop_after_save": 40, "stops": []}
    job = RankedJob(tmp_path, 3, "agreeing.py", seed=2, has_collective=True, **spec)
    assert job.run() == [0, 0, 0], job.output
    (found, *_), *others = job.printed
    assert all(one[0] == found for one in others)
    assert all(steps[-1] == 40 for _, steps in json.loads(found))


def test_without_a_fact_nobody_stops(tmp_path):
    """The end of the loop is no agreement: they leave together all the same."""
    job = RankedJob(
        tmp_path, 2, "agreeing.py", seed=3, stops=[], has_collective=False, boundaries=200
    )
    assert job.run() == [0, 0], job.output
    assert json.loads(job.printed[0][0]) == [[199, []], [199, []]]
