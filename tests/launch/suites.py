"""Hydra's own suites for launchers, for whichever of ours is named."""

import pytest
from hydra.core.plugins import Plugins
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)

# Each test restores the singletons that it found: found too early, there are no plugins ever after.
Plugins.instance()


def suites(launcher, *overrides):
    """The classes of tests: jobs of a sweep, a sweep in batches, whole scripts."""
    names = ("launcher_name", "overrides")
    batched = ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"]
    flags = ["-m", f"hydra/launcher={launcher}", *overrides]

    @pytest.mark.parametrize(names, [(launcher, list(overrides))])
    class Jobs(LauncherTestSuite):
        pass

    @pytest.mark.parametrize(names, [(launcher, [*overrides, *batched])])
    class Batches(BatchedSweeperTestSuite):
        pass

    @pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, flags)])
    class Integration(IntegrationTestSuite):
        pass

    return Jobs, Batches, Integration
