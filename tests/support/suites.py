"""Hydra's own suites for launchers, for whichever of ours is named."""

import subprocess
from functools import partial

import pytest
import warm
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import VersionBase

# Each test restores the singletons that it found: found too early, there are no plugins ever after.
Plugins.instance()


class _WithoutVersionBase:
    """As Hydra runs them: whether a job changes its directory depends on it."""

    @pytest.fixture(autouse=True)
    def _forget_that_of_other_tests(self, monkeypatch):
        monkeypatch.delitem(Singleton._instances, VersionBase, raising=False)

    @pytest.fixture(autouse=True)
    def _fork_jobs(self, monkeypatch):
        monkeypatch.setattr(subprocess, "Popen", partial(warm.Popen, is_parent=True))


def suites(launcher, *overrides):
    """The classes of tests: jobs of a sweep, a sweep in batches, whole scripts."""
    names = ("launcher_name", "overrides")
    batched = ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"]
    flags = ["-m", f"hydra/launcher={launcher}", *overrides]

    @pytest.mark.parametrize(names, [(launcher, list(overrides))])
    class Jobs(_WithoutVersionBase, LauncherTestSuite):
        pass

    @pytest.mark.parametrize(names, [(launcher, [*overrides, *batched])])
    class Batches(_WithoutVersionBase, BatchedSweeperTestSuite):
        pass

    @pytest.mark.parametrize(("task_launcher_cfg", "extra_flags"), [({}, flags)])
    class Integration(_WithoutVersionBase, IntegrationTestSuite):
        pass

    return Jobs, Batches, Integration
