"""Sharded state: each rank writes its own part, and any number of ranks reads the very same whole.

Real ranks, `jobs/shards.py`: what they hold together is compared by a digest of each whole tensor.
"""

import json
import shutil

import pytest
from ranked import RankedJob


def ranks(directory, size, wrap="rows", **spec):
    """What each of so many ranks loaded, and holds in the end."""
    job = RankedJob(directory, size, script="shards.py", wrap=wrap, **spec)
    codes = job.run()
    assert codes == [0] * size, job.output
    found = [json.loads((directory / f"loaded_{rank}.json").read_text()) for rank in range(size)]
    for one in found:
        assert one["all"] == found[0]["all"]
    return found


@pytest.fixture(scope="module", params=["AdamW", "SGD"])
def saved(request, tmp_path_factory):
    """A checkpoint of four ranks, what it holds, and the optimizer."""
    directory = tmp_path_factory.mktemp("saved")
    found = ranks(directory, 4, steps=3, save=1, optimizer=request.param)
    return directory, found[0]["all"], request.param


def copied(saved, tmp_path):
    shutil.copytree(saved[0] / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    return tmp_path


@pytest.mark.parametrize("size", [4, 2, 1, 3])
def test_any_number_of_ranks_has_the_same_whole(size, saved, tmp_path):
    """In place, with a fresh optimizer; and saved again by these, it is the same to four."""
    _, whole, optimizer = saved
    directory = copied(saved, tmp_path)
    for one in ranks(directory, size, seed=1, save=2, optimizer=optimizer):
        assert one["all"] == whole
        assert one["is_in_place"]
    assert ranks(directory, 4, seed=2, optimizer=optimizer)[0]["all"] == whole
