"""A job as it is started: what the launcher decides, and its wrapper, supervisor and task go by.

`<job dir>/.forge/plan.json` holds it; for a job on a cluster the bundle of its submission does
until the wrapper takes it out. Written and read here alone. A plan of another
version of forge is read if it has every field that this version needs, and no unknown field except
removed keys of the policy; otherwise the error names the field. So a field whose type or meaning
changes gets a new name.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forge._version import __version__
from forge.config import removed
from forge.config.schema import RequeueConfig, RequeueRule
from forge.errors import ConfigError
from forge.jobdir.job_files import PLAN, forge_dir, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """How the step of a job on a cluster is started."""

    ranks: int
    """Tasks of the step."""
    start: list[str]
    """What begins the supervisor of each rank, in the container where there is one."""
    srun_args: list[str]
    kill_wait_s: float
    """Slurm's KillWait: from its SIGTERM at the limit to its SIGKILL."""
    exclude_h: float = 24.0
    """Hours for which a node is avoided that has failed a health check."""


@dataclass(frozen=True, kw_only=True)
class ExecPlan:
    """A task that knows nothing of forge: how it is stopped, and what its end means."""

    is_group_signalled: bool = True
    """Whether signals go to its process group, or to the process that was started alone."""
    supports_termination: bool = True
    """Whether it is given time after a signal; else it is killed at once."""
    is_zero_finished: bool = False
    """Whether it has come to its end where it exits 0 after a signal."""


@dataclass(frozen=True, kw_only=True)
class RequeueLimits:
    """When the job is started again, and how often."""

    enabled: bool = True
    why_not: str = "`resilience.requeue.enabled` is false"
    """For people, where it is not enabled."""
    is_up_to_site: bool = False
    """Whether Slurm alone decides what becomes of a job that it stops: there is no policy."""
    max_preemptions: int | None = None
    max_timeouts: int | None = None
    max_failures: int | None = None
    max_hangs: int | None = None
    is_hang_final: bool = False
    """Whether a hang ends the job."""
    max_excluded_nodes: int | None = None
    has_other_nodes: bool = False
    """Whether a job that finds its node unhealthy can be started on others."""
    max_no_progress: int
    rules: list[RequeueRule] = field(default_factory=list)

    @classmethod
    def of(cls, config: RequeueConfig, **more: Any) -> RequeueLimits:
        """Those of a policy; `more` are fields of their own."""
        shared = {one.name for one in fields(cls)} & {one.name for one in fields(config)}
        return cls(**{name: getattr(config, name) for name in shared} | more)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Everything that a job's processes need to know of it."""

    overrides: list[str]
    command: list[str]
    """The task."""
    exec: ExecPlan | None = None
    """For a command of `forge exec`; None: it is the user's main that runs."""
    cwd: str
    environment: dict[str, str]
    """Added to the environment of the wrapper."""
    place: list[int]
    """Device and inode of the job's directory, where it is there: a copy of it has others."""
    token: str
    """Marks the processes of this job, over all its starts."""
    program: str
    """Script, function and config name: what the overrides are overrides of."""
    composed: str
    """sha256 of the config as it was composed, interpolations and all."""
    main: dict[str, str] | None
    """How the task imports the `__main__` of the sweep; None: it does not need it."""
    argv: list[str]
    orig_argv: list[str]
    path: list[str]
    """sys.path of the task."""
    has_whole_path: bool = True
    """Whether `path` is all of sys.path; else what that interpreter has comes after it."""
    checkpoint_dir: str
    """As the policy has it: a relative one lies in the job's directory, wherever that is now."""
    time_limit_s: float | None
    """Of each start."""
    signal: str
    warning_s: float
    timeout_s: float
    actions: dict[str, str]
    requeue: RequeueLimits
    hang: str = "ignore"
    """What a hang leads to: ignore | warn | restart | halt."""
    written: dict[str, Any] | None = None
    """The config as it was written, for the job's identity; None: without a policy."""
    tasks: int = 1
    """Ranks, where it is not on a cluster."""
    slurm: SlurmPlan | None = None
    """None: not on a cluster."""
    launch: str = ""
    """The bundle that it was taken out of; a later one has a higher name."""
    version: str = __version__
    """Of the forge that made it."""

    @property
    def num_ranks(self) -> int:
        """Tasks of the job, here or on a cluster."""
        return self.tasks if self.slurm is None else self.slurm.ranks

    def to_json(self) -> dict[str, Any]:
        """As the file has it."""
        return asdict(self)

    def write(self, directory: Path) -> None:
        """Put it where the job's processes look for it."""
        write_json(forge_dir(directory) / PLAN, self.to_json())


@dataclass(frozen=True, kw_only=True)
class EarlierPlan:
    """What a launcher asks of the plan of an earlier start, whatever version has made it."""

    overrides: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    place: list[int] = field(default_factory=list)
    token: str = ""
    program: str | None = None
    composed: str | None = None
    checkpoint_dir: str = "checkpoints"
    timeout_s: float = 0.0
    written: dict[str, Any] | None = None
    launch: str = ""
    command: list[str] = field(default_factory=list)


_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("environment", "written"), dict),
    **dict.fromkeys(("overrides", "place", "command"), list),
    **dict.fromkeys(("token", "program", "composed", "checkpoint_dir", "launch"), str),
    "timeout_s": (int, float),
}
"""What JSON has for each field of an earlier plan; null and anything else is its default."""


_NEW_NAMES = {"lead_s": "warning_s"}
"""Fields of a plan by the name that earlier versions gave them."""


def read(directory: Path) -> JobPlan:
    """The plan of the job in a directory.

    Raises:
        ConfigError: Where there is none, or none that this version of forge can go by.
    """
    path = forge_dir(directory) / PLAN
    content = read_json(path)
    if content is None:
        raise ConfigError([f"{path} cannot be read: start the sweep again"], "The job's plan")
    return from_json(content, str(path))


def from_json(content: dict[str, Any], where: str) -> JobPlan:
    """A plan out of what `JobPlan.to_json` has made.

    Args:
        content: The object of JSON.
        where: The file that it lies in, for the message.
    Raises:
        ConfigError: Where it is not what this version of forge goes by.
    """
    try:
        slurm, requeue, command = content.get("slurm"), content["requeue"], content.get("exec")
        requeue = removed.without({"requeue": requeue})[0]["requeue"]
        content = {_NEW_NAMES.get(name, name): value for name, value in content.items()}
        rules = [RequeueRule(**rule) for rule in requeue["rules"]]
        typed = {
            "slurm": None if slurm is None else SlurmPlan(**slurm),
            "requeue": RequeueLimits(**{**requeue, "rules": rules}),
            "exec": None if command is None else ExecPlan(**command),
        }
        return JobPlan(**{**content, **typed})
    except (TypeError, LookupError) as error:
        version = content.get("version")
        made_by = f"forge {version}" if version else "an earlier version of forge"
        raise ConfigError(
            [
                f"{where}: {error}. It was written by {made_by}, and this is forge {__version__}:"
                " start the sweep again with this one, or go back to the other."
            ],
            "The job's plan",
        ) from error


def read_earlier(directory: Path) -> EarlierPlan:
    """What is known of an earlier start; what is damaged, or was not there yet, is the default."""
    content = read_json(forge_dir(directory) / PLAN) or {}
    known: dict[str, Any] = {k: v for k, v in content.items() if isinstance(v, _KINDS.get(k, ()))}
    return EarlierPlan(**known)
