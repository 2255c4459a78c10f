"""`hydra/launcher=local`: the shell that Hydra knows; the work is done in forge/launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Runs the jobs of a sweep on this machine; options: conf/hydra/launcher/local.yaml."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._taken: set[int] = set()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before `launch`."""
        from forge.launch import remembered

        remembered.watch(hydra_context)
        self._context = hydra_context
        self._task_function = task_function
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run one batch of jobs to its end."""
        from forge.launch import local  # not at the top: every Hydra app imports this module

        return local.launch(
            self._options,
            self._context,
            self._task_function,
            self._config,
            [list(overrides) for overrides in job_overrides],
            initial_job_idx,
            self._taken,
        )
