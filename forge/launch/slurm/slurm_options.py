"""The options of `hydra/launcher=slurm`: those of hydra-submitit-launcher, and ours.

A job may have its own where the launcher's config gives one for all: `resilience.slurm.<key>`,
which can be swept. What both say of signals and restarts is the policy's to decide.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, fields, replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from forge.config.schema import Policy, SlurmConfig
from forge.errors import ConfigError
from forge.launch.option_check import OptionCheck

_OURS = {
    "signal": "resilience.signal.name and resilience.signal.lead_s",
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


@dataclass(frozen=True)
class SlurmOptions:
    """What conf/hydra/launcher/slurm.yaml sets; the comments there say what each key means."""

    submitit_folder: str = ""
    timeout_min: float = 60
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int = 1
    mem_gb: float | None = None
    nodes: int = 1
    name: str = "forge"
    stderr_to_stdout: bool = False
    partition: str | None = None
    qos: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    gres: str | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    account: str | None = None
    signal_delay_s: int | None = None
    max_num_timeout: int | None = None
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    array_parallelism: int = 256
    setup: list[str] | None = None
    teardown: list[str] | None = None
    nodelist: str | None = None
    dependency: str | None = None
    srun_args: list[str] | None = None
    python: str | None = None
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
        return self.nodes * self.tasks_per_node

    def of_job(self, policy: Policy | None) -> SlurmOptions:
        """These options with the job's own."""
        if policy is None:
            return self
        own = {name: getattr(policy.slurm, name) for name in _OWN_KEYS}
        return replace(self, **{name: value for name, value in own.items() if value is not None})


_OWN_KEYS = [one.name for one in fields(SlurmConfig)]


def read(given: dict[str, Any]) -> SlurmOptions:
    """Check the launcher's options.

    Raises:
        ConfigError: With every problem found.
    """
    plain: dict[str, Any] = {
        key: OmegaConf.to_container(value, resolve=True)
        if isinstance(value, (DictConfig, ListConfig))
        else value
        for key, value in given.items()
    }
    check = OptionCheck(SlurmOptions, plain)
    options = check.options
    check.expect_minutes("timeout_min")
    for key in ("nodes", "tasks_per_node", "array_parallelism"):
        check.expect_count(key, 1)
    for key in ("cpus_per_task", "cpus_per_gpu", "signal_delay_s"):
        check.expect_count(key, 1, or_null=True)
    for key in ("gpus_per_node", "gpus_per_task", "max_num_timeout"):
        check.expect_count(key, 0, or_null=True)
    for key in ("setup", "teardown", "srun_args"):
        value = getattr(options, key)
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        check.expect(key, value is None or is_list, "a list of strings, or null")
    for key in ("wait", "dry_run", "stderr_to_stdout"):
        check.expect(key, isinstance(getattr(options, key), bool), "true or false")
    check.expect_progress("progress")
    try:
        shlex.split(options.python or "")
    except ValueError as error:
        check.expect("python", False, f"a shell command ({error})")
    for key in options.additional_parameters:
        name = str(key).replace("_", "-")
        if name in _OURS:
            check.problems.append(
                f"`hydra.launcher.additional_parameters.{key}`: forge sets --{name} itself, and a"
                f" second one would silently replace it. Leave it out; set {_OURS[name]}."
            )
    return check.checked()


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
        ("signal_delay_s", "signal.lead_s", defaults.signal.lead_s),
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
