"""What Hydra calls: the base of both launchers, and what it hands them, as one value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass(frozen=True)
class Request:
    """One batch of a sweep, as Hydra asks for it."""

    options: dict[str, Any]
    """The launcher's, as they were given."""
    context: HydraContext
    function: TaskFunction
    """The user's main."""
    config: DictConfig
    """The sweep's, composed by Hydra."""
    job_overrides: list[list[str]]
    """The task overrides of each job."""
    first_number: int
    """Hydra's number of the first job."""
    taken: set[int]
    """Numbers of the jobs that this launcher has run before; grows with each batch."""


class HydraLauncher(Launcher):
    """Collects what Hydra says, and hands it on; abstract, so Hydra takes it for no launcher."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._taken: set[int] = set()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before `launch`."""
        self._context = hydra_context
        self._task_function = task_function
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run one batch of jobs to its end."""
        return self.run(
            Request(
                self._options,
                self._context,
                self._task_function,
                self._config,
                [list(overrides) for overrides in job_overrides],
                initial_job_idx,
                self._taken,
            )
        )

    @abstractmethod
    def run(self, request: Request) -> list[JobReturn]:
        """Run one batch of jobs to its end."""
