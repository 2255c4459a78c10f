"""The interface to Hydra: the base class of both launchers, and the arguments of a batch.

`hydra_plugins/forge_launcher/` has the two classes that Hydra finds; each passes a `Request` on to
`launch/local/launcher.py` or `launch/slurm/launcher.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from forge import messages


@dataclass(frozen=True)
class Request:
    """One batch of a sweep, as Hydra passes it."""

    options: dict[str, Any]
    """The launcher's own options, not yet checked."""
    context: HydraContext
    function: TaskFunction
    """The user's main."""
    config: DictConfig
    """The sweep's config, composed by Hydra."""
    job_overrides: list[list[str]]
    """The task overrides of each job."""
    first_number: int
    """Hydra's number of the first job."""
    taken: set[int]
    """Numbers of the jobs that this launcher has run; grows with each batch."""


class HydraLauncher(Launcher):
    """Collects the arguments of Hydra's calls; abstract, so that Hydra does not list it."""

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
        if not self._taken:
            check_sweeper(self._config.hydra.sweeper)
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


def check_sweeper(sweeper: Any) -> None:
    """Warn of options of Hydra's Optuna sweeper with which a killed sweep cannot be resumed.

    Args:
        sweeper: The config `hydra.sweeper`.
    """
    if "hydra_optuna_sweeper" not in str(sweeper.get("_target_")):
        return
    sampler, storage = sweeper.get("sampler") or {}, sweeper.get("storage")
    if "seed" in sampler and sampler["seed"] is None:
        messages.warn(
            "`hydra.sweeper.sampler.seed=null`: if this launcher is killed, the same command draws"
            " other parameters, and trains with those. Set a seed"
        )
    if isinstance(storage, str):
        messages.warn(
            f"`hydra.sweeper.storage={storage}`: if this launcher is killed, the same command adds"
            " the trials a second time, and some stay RUNNING. Set `hydra.sweeper.storage` to"
            f" {{_target_: forge.integrations.optuna.Storage, url: {storage}}}"
        )
