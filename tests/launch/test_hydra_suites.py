"""Hydra's own suites for launchers, with ours."""

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from suites import suites

TestLocal, TestLocalInBatches, TestLocalIntegration = suites(
    "local", "hydra.launcher.progress=none"
)
for one in (TestLocalInBatches, TestLocalIntegration):  # the sweeper's business, and whole scripts
    pytest.mark.proofs(one)


def test_hydra_discovers_the_launchers():
    found = {one.__name__ for one in Plugins.instance().discover(Launcher)}
    assert {"LocalLauncher", "SlurmLauncher"} <= found
