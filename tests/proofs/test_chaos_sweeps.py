"""Sweeps of the local launcher outlive SIGKILLs of any of their processes; the whole of it is
`python tests/proofs/chaos_sweeps.py`."""

import chaos_sweeps
import pytest
from harness import made_once

SEED = 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(1))
def test_a_killed_sweep_ends_with_the_bits_of_undisturbed_ones(number, tmp_path, shared_folder):
    """Same weights, same metrics, one attempt of a job at a time, and no process left."""
    folder = made_once(shared_folder / "undisturbed_chaos", chaos_sweeps.run_references)
    references = chaos_sweeps.found_references(folder)
    outcome = chaos_sweeps.one_sweep(number, SEED, tmp_path, references)
    assert not outcome.problems, "\n".join([str(outcome), *outcome.problems])
    assert outcome.hits
