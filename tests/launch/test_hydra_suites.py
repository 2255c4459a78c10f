"""Hydra's own suites for launchers, with ours."""

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)

OVERRIDES = ["hydra.launcher.progress=none"]


def test_hydra_discovers_the_launcher():
    assert "LocalLauncher" in [one.__name__ for one in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("local", OVERRIDES)])
class TestLocal(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [
        (
            "local",
            [
                *OVERRIDES,
                "hydra/sweeper=basic",
                "hydra.sweeper.max_batch_size=2",
            ],
        )
    ],
)
class TestLocalInBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", "hydra/launcher=local", *OVERRIDES])],
)
class TestLocalIntegration(IntegrationTestSuite):
    pass
