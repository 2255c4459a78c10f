"""One cluster for all tests of a test process."""

import pytest
from cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A true Slurm with two nodes; skipped where Slurm is not installed."""
    problem = missing()
    if problem:
        pytest.skip(problem)
    running = Cluster(tmp_path_factory.mktemp("slurm") / "run")
    yield running
    running.stop()
