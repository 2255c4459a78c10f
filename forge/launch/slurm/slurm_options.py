"""The options of `hydra/launcher=slurm`: those of hydra-submitit-launcher, and forge's.

The launcher's config applies to all jobs. A job can override an option by `resilience.slurm.<key>`,
which can be swept. The policy defines the effect of signals and restarts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from forge.config.schema import Policy
from forge.errors import ConfigError
from forge.launch import option_check

OURS = {
    "signal": "set resilience.signal.name and resilience.signal.warning_s instead",
    "requeue": "set resilience.requeue.enabled instead; after --requeue=expedite Slurm would bring"
    " back jobs that forge has ended",
    "no-requeue": "set resilience.requeue.enabled instead",
    "array": "set hydra.launcher.array_parallelism instead",
    "output": "set hydra.launcher.submitit_folder instead",
    "error": "set hydra.launcher.submitit_folder instead",
    "open-mode": "forge always appends to the logs",
    "parsable": "forge reads the output of sbatch",
    "wrap": "forge submits a batch script of its own",
    "wait": "set hydra.launcher.wait instead",
    "chdir": "jobs run in the directory in which the sweep was started",
}
"""sbatch options that forge sets itself -> the alternative, or why there is none."""
_LEAST = {
    **dict.fromkeys(("nodes", "tasks_per_node", "array_parallelism", "cpus_per_task"), 1),
    **dict.fromkeys(("gpus_per_node", "gpus_per_task", "mem_gb"), 0),
    "cpus_per_gpu": 1,
    "signal_delay_s": 1,
    "max_num_timeout": 0,
}
"""The minimum of options, unless they are null."""


@dataclass
class SlurmOptions(SlurmQueueConf):  # type: ignore[misc]
    """The options in conf/hydra/launcher/slurm.yaml; its comments explain each key.

    Inherits the options and types of the installed version of hydra-submitit-launcher.
    """

    # Changed: an interpolation there has a plain default here; fractions or null are allowed.
    submitit_folder: str = ""
    name: str = "forge"
    timeout_min: float = 60
    mem_gb: float | None = None
    signal_delay_s: int | None = None
    max_num_timeout: int | None = None
    # The next version of hydra-submitit-launcher has these three.
    srun_args: list[str] | None = None
    python: str | None = None
    use_srun: bool = True
    teardown: list[str] | None = None
    nodelist: str | None = None
    dependency: str | None = None
    wait: bool = True
    dry_run: bool = False
    snapshot: bool = False
    progress: str = "auto"

    @property
    def time_limit_s(self) -> float:
        """Time limit of one start of a job, in seconds."""
        return 60.0 * self.timeout_min

    @property
    def ranks(self) -> int:
        """Tasks of a job."""
        return int(self.nodes) * int(self.tasks_per_node or 1)

    def of_job(self, policy: Policy | None) -> SlurmOptions:
        """These options, overridden by the job's own.

        Raises:
            ConfigError: With every problem in the job's options.
        """
        if policy is None or not policy.slurm:
            return self
        own, problems = _checked(policy.slurm)
        if problems:
            raise ConfigError(option_check.sentences(policy.slurm, problems, "resilience.slurm"))
        return replace(self, **{name: getattr(own, name) for name in policy.slurm})


def read(given: dict[str, Any]) -> SlurmOptions:
    """Check the launcher's options.

    Raises:
        ConfigError: With every problem found.
    """
    options, problems = _checked(given)
    if problems:
        sentences = option_check.sentences(given, problems, "hydra.launcher")
        raise ConfigError(sentences, "The launcher's configuration")
    return options


def _checked(given: Mapping[str, Any]) -> tuple[SlurmOptions, dict[str, str]]:
    """The options, and their problems by key."""
    options, problems = option_check.read(SlurmOptions, given, _LEAST)
    if not options.use_srun:
        problems["use_srun"] = "expected true: forge starts tasks with srun."
    try:
        shlex.split(options.python or "")
    except ValueError as error:
        problems["python"] = f"expected a shell command ({error})."
    for key in options.additional_parameters:
        name = str(key).partition("=")[0].strip("- ").replace("_", "-")
        if name in OURS:
            problems[f"additional_parameters.{key}"] = (
                f"forge sets --{name} itself, and a second --{name} would replace it without"
                f" warning. Remove this key ({OURS[name]})."
            )
    return options, problems


def into_policy(options: SlurmOptions, cfg: DictConfig) -> None:
    """Copy the launcher's options about signals and restarts to the keys of the policy.

    Each becomes an override of the job, since it is another name of the same key: the job is
    stored, compared and restarted with it.

    Raises:
        ConfigError: If the two contradict each other.
    """
    problems = []
    defaults = Policy()
    pairs = [
        ("signal_delay_s", "signal.warning_s", defaults.signal.warning_s),
        ("max_num_timeout", "requeue.max_timeouts", defaults.requeue.max_timeouts),
    ]
    for name, key, default in pairs:
        wanted = getattr(options, name)
        if wanted is None or OmegaConf.select(cfg, "resilience") is None:
            continue
        present = OmegaConf.select(cfg, f"resilience.{key}", default=default)
        if present not in (default, wanted):
            problems.append(
                f"`hydra.launcher.{name}={wanted}` and `resilience.{key}={present}` contradict"
                " each other. Remove the first."
            )
            continue
        with read_write(cfg), open_dict(cfg):
            OmegaConf.update(cfg, f"resilience.{key}", wanted, force_add=True)
            cfg.hydra.overrides.task.append(f"++resilience.{key}={wanted}")
    if problems:
        raise ConfigError(problems, "The launcher's configuration")
