"""One of what `python tests/proofs/early_signals.py 50` does."""

import pytest
from early_signals import Struck

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_signal_in_the_first_100_ms_is_not_lost(cluster, tmp_path):
    """Imports take tens of seconds on a network disk: somebody will signal in them."""
    struck = Struck(cluster, tmp_path / "app", 1)
    assert struck.survivors() == 1, struck.sweep.output
    assert len(struck.strikes) == 1
