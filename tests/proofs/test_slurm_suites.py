"""Hydra's own suites for launchers, with `hydra/launcher=slurm` on a true cluster."""

import os

import pytest
from suites import suites

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TestSlurm, TestSlurmInBatches, TestSlurmIntegration = suites(
    "slurm", "hydra.launcher.progress=none"
)


@pytest.fixture(autouse=True)
def _on_the_cluster(cluster, monkeypatch):
    """The suites launch from this process, and start scripts with its environment."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
