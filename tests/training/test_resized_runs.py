"""A training that another number of ranks continues with the next epoch."""

import itertools
import json

import pytest
from ranked import RankedJob
from rows import few


def seen(directory):
    """The samples of each step, the ranks' parts in their order."""
    found = {}
    for path in sorted(directory.glob("seen_*.txt")):
        for step, samples in map(json.loads, path.read_text().splitlines()):
            found.setdefault(step, []).extend(samples)
    return found


def run(directory, size, **spec):
    job = RankedJob(directory, size, "resized.py", **spec)
    return job, job.run(FORGE_RESUME="changed")  # another spec is another job


@pytest.mark.parametrize(
    ("kind", "loop"),
    few(1, [*itertools.product(["distributed", "global"], ["epochs", "steps"])]),
)
def test_after_a_change_each_step_has_the_samples_that_it_would_have_had(kind, loop, tmp_path):
    """Stopped after the last batch of the first epoch, on three ranks; two go on."""
    spec = {"kind": kind, "loop": loop}
    assert run(tmp_path / "alone", 1, **spec)[1] == [0]
    job, codes = run(tmp_path / "resized", 3, at=7, **spec)
    assert codes == [75] * 3, job.output
    job, codes = run(tmp_path / "resized", 2, **spec)
    assert codes == [0] * 2, job.output
    assert "was saved by 3 ranks and is resumed by 2" in job.output
    expected, found = seen(tmp_path / "alone"), seen(tmp_path / "resized")
    assert found.keys() == expected.keys() == set(range(40))
    assert all(sorted(found[step]) == sorted(expected[step]) for step in expected)
    if kind == "global":
        assert found == expected
