"""The options of `hydra/launcher=slurm`: those of hydra-submitit-launcher, and ours.

A job may have its own where the launcher's config gives one for all: `resilience.slurm.<key>`,
which can be swept. What signals and restarts mean is the policy's to say.
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

_OURS = {
    "signal": "resilience.signal.name and resilience.signal.warning_s",
    "requeue": "resilience.requeue.enabled",
    "no-requeue": "resilience.requeue.enabled",
    "array": "hydra.launcher.array_parallelism",
    "output": "hydra.launcher.submitit_folder",
    "error": "hydra.launcher.submitit_folder",
    "open-mode": "nothing: logs are always appended to",
    "parsable": "nothing",
    "wrap": "nothing",
    "wait": "hydra.launcher.wait",
    "chdir": "nothing: jobs run where the sweep was started",
}
"""sbatch options that belong to forge -> what to set instead."""
_LEAST = {
    **dict.fromkeys(("nodes", "tasks_per_node", "array_parallelism", "cpus_per_task"), 1),
    **dict.fromkeys(("gpus_per_node", "gpus_per_task", "mem_gb"), 0),
    "cpus_per_gpu": 1,
    "signal_delay_s": 1,
    "max_num_timeout": 0,
}
"""Options that have a least value, where they are not null."""


@dataclass
class SlurmOptions(SlurmQueueConf):  # type: ignore[misc]
    """What conf/hydra/launcher/slurm.yaml sets; the comments there say what each key means.

    All that hydra-submitit-launcher has, with its types, in whatever version is installed.
    """

    # Theirs, otherwise: what is an interpolation there, and may be a fraction or null here.
    submitit_folder: str = ""
    name: str = "forge"
    timeout_min: float = 60
    mem_gb: float | None = None
    signal_delay_s: int | None = None
    max_num_timeout: int | None = None
    # Its next version has these three.
    srun_args: list[str] | None = None
    python: str | None = None
    use_srun: bool = True
    teardown: list[str] | None = None
    nodelist: str | None = None
    dependency: str | None = None
    wait: bool = True
    dry_run: bool = False
    progress: str = "auto"

    @property
    def time_limit_s(self) -> float:
        """Seconds that one start of a job may take."""
        return 60.0 * self.timeout_min

    @property
    def ranks(self) -> int:
        """Tasks of a job."""
        return int(self.nodes) * int(self.tasks_per_node or 1)

    def of_job(self, policy: Policy | None) -> SlurmOptions:
        """These options with the job's own.

        Raises:
            ConfigError: With every problem of the job's own.
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
    """The options, and what is wrong with them, by key."""
    options, problems = option_check.read(SlurmOptions, given, _LEAST)
    if not options.use_srun:
        problems["use_srun"] = "expected true: forge starts tasks by srun."
    try:
        shlex.split(options.python or "")
    except ValueError as error:
        problems["python"] = f"expected a shell command ({error})."
    for key in options.additional_parameters:
        name = str(key).replace("_", "-")
        if name in _OURS:
            problems[f"additional_parameters.{key}"] = (
                f"forge sets --{name} itself, and a second one would silently replace it. Leave it"
                f" out; set {_OURS[name]}."
            )
    return options, problems


def into_policy(options: SlurmOptions, cfg: DictConfig) -> None:
    """Put what the launcher's config says of signals and restarts where the policy has it.

    As an override of the job: it is another name of the same key, so the job is stored, compared
    and started again with it.

    Raises:
        ConfigError: Where the two contradict each other.
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
                " each other. Leave out the first."
            )
            continue
        with read_write(cfg), open_dict(cfg):
            OmegaConf.update(cfg, f"resilience.{key}", wanted, force_add=True)
            cfg.hydra.overrides.task.append(f"++resilience.{key}={wanted}")
    if problems:
        raise ConfigError(problems, "The launcher's configuration")
