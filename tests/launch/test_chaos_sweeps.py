"""Sweeps of the local launcher outlive SIGKILLs of any of their processes; the whole of it is
`python tests/chaos_sweeps.py`."""

import chaos_sweeps
import pytest

SEED = 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_sweeps_end_with_the_bits_of_undisturbed_ones(tmp_path):
    """Same weights, same metrics, one attempt of a job at a time, and no process left."""
    references = chaos_sweeps.run_references(tmp_path / "undisturbed")
    for number in range(2):
        outcome = chaos_sweeps.one_sweep(number, SEED, tmp_path, references)
        assert not outcome.problems, "\n".join([str(outcome), *outcome.problems])
        assert outcome.hits
