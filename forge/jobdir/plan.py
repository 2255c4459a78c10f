"""The plan of a job: written by the launcher, read by its wrapper, supervisor and task.

It is in `<job dir>/.forge/plan.json`; on a cluster the wrapper extracts it from the bundle of the
submission. Only this module writes and reads it. A plan of another version of forge is accepted if
it has every field that this version needs, and no unknown field; otherwise the error names the
field. So a field whose type or meaning changes gets a new name.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forge._version import __version__
from forge.config.schema import RequeueConfig, RequeueRule
from forge.errors import ConfigError
from forge.jobdir.job_files import PLAN, forge_dir, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """How to start the Slurm step of a job."""

    ranks: int
    """Number of tasks of the step."""
    start: list[str]
    """The command that starts the supervisor of each rank, in the container if there is one."""
    srun_args: list[str]
    kill_wait_s: float
    """Slurm's KillWait: the time from SIGTERM at the limit to SIGKILL."""
    exclude_h: float = 24.0
    """Hours for which to exclude a node that has failed a health check."""
    name: str = ""
    """The job's name in the queue; empty: that of the batch script."""


@dataclass(frozen=True, kw_only=True)
class ExecPlan:
    """A command of `forge exec`: how to stop it, and what its exit code means."""

    is_group_signalled: bool = True
    """Whether signals go to its whole process group, or only to the process itself."""
    supports_termination: bool = True
    """Whether it gets time to exit after a signal; else it is killed immediately."""
    is_zero_finished: bool = False
    """Whether exit code 0 after a signal means that it has finished."""
    done_file: str | None = None
    """A file without which exit code 0 does not mean that it has finished."""


@dataclass(frozen=True, kw_only=True)
class RequeueLimits:
    """When and how often the job is restarted."""

    enabled: bool = True
    why_not: str = "`resilience.requeue.enabled` is false"
    """The reason to show if it is not enabled."""
    is_up_to_site: bool = False
    """Whether only Slurm decides if a stopped job is requeued, since there is no policy."""
    max_preemptions: int | None = None
    max_timeouts: int | None = None
    max_failures: int | None = None
    max_hangs: int | None = None
    is_hang_final: bool = False
    """Whether a hang ends the job."""
    max_excluded_nodes: int | None = None
    has_other_nodes: bool = False
    """Whether a job whose node is unhealthy can be started on other nodes."""
    max_no_progress: int
    rules: list[RequeueRule] = field(default_factory=list)

    @classmethod
    def of(cls, config: RequeueConfig, **more: Any) -> RequeueLimits:
        """The limits in a policy; `more` are fields that the policy does not have."""
        shared = {one.name for one in fields(cls)} & {one.name for one in fields(config)}
        return cls(**{name: getattr(config, name) for name in shared} | more)


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """All settings that a job's processes need."""

    overrides: list[str]
    command: list[str]
    """The command of the task."""
    exec: ExecPlan | None = None
    """For a command of `forge exec`; None: the task runs the user's main."""
    cwd: str
    environment: dict[str, str]
    """Variables added to the environment of the wrapper."""
    inode: list[int]
    """Device and inode of the job's directory, to detect a copy; empty if it did not exist."""
    token: str
    """Marks the processes of this job, over all its starts."""
    program: str
    """Script, function and config name, to which the overrides apply."""
    composed: str
    """sha256 of the composed config, with its interpolations unresolved."""
    main: dict[str, str] | None
    """How the task imports the `__main__` of the sweep; None: it does not need it."""
    argv: list[str]
    orig_argv: list[str]
    path: list[str]
    """sys.path of the task."""
    has_whole_path: bool = True
    """Whether `path` is the whole sys.path; else the interpreter's own entries follow."""
    checkpoint_dir: str
    """As in the policy; a relative path is relative to the job's current directory."""
    time_limit_s: float | None
    """Time limit of each start."""
    signal: str
    warning_s: float
    timeout_s: float
    actions: dict[str, str]
    requeue: RequeueLimits
    hang: str = "ignore"
    """The action on a hang: ignore | warn | restart | halt."""
    written: dict[str, Any] | None = None
    """The config as written, for the job's identity; None: there is no policy."""
    tasks: int = 1
    """Number of ranks, if the job does not run on a cluster."""
    slurm: SlurmPlan | None = None
    """None: the job does not run on a cluster."""
    code: dict[str, str] = field(default_factory=dict)
    """Source file of the sweep's program -> its sha256 at the submission."""
    snapshot: str = ""
    """The copy of the code from which the job runs; empty: it runs from the code itself."""
    launch: str = ""
    """Name of the bundle from which it was extracted; a later bundle has a higher name."""
    version: str = __version__
    """The version of forge that wrote it."""

    @property
    def num_ranks(self) -> int:
        """Number of tasks of the job, on this machine or on a cluster."""
        return self.tasks if self.slurm is None else self.slurm.ranks

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return asdict(self)

    def write(self, directory: Path) -> None:
        """Write it to the job's directory."""
        write_json(forge_dir(directory) / PLAN, self.to_json())


@dataclass(frozen=True, kw_only=True)
class EarlierPlan:
    """The fields that a launcher needs from the plan of an earlier start, of any version."""

    overrides: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    inode: list[int] = field(default_factory=list)
    token: str = ""
    program: str | None = None
    composed: str | None = None
    checkpoint_dir: str = "checkpoints"
    written: dict[str, Any] | None = None
    launch: str = ""
    command: list[str] = field(default_factory=list)


_KINDS: dict[str, type] = {
    **dict.fromkeys(("environment", "written"), dict),
    **dict.fromkeys(("overrides", "inode", "command"), list),
    **dict.fromkeys(("token", "program", "composed", "checkpoint_dir", "launch"), str),
}
"""Expected JSON type of each field of an earlier plan; for another type the default is used."""


def read(directory: Path) -> JobPlan:
    """The plan of the job in a directory.

    Raises:
        ConfigError: If there is no plan, or this version of forge cannot use it.
    """
    path = forge_dir(directory) / PLAN
    content = read_json(path)
    if content is None:
        raise ConfigError(
            [
                f"{path} is missing or cannot be read. Run the sweep's command again: it writes the"
                " file, and does not repeat finished jobs."
            ],
            "The job's plan",
        )
    return from_json(content, str(path))


def from_json(content: dict[str, Any], where: str) -> JobPlan:
    """Decode the result of `JobPlan.to_json`.

    Args:
        content: The JSON object.
        where: The file that contains it, for the message.
    Raises:
        ConfigError: If this version of forge cannot use it.
    """
    try:
        slurm, requeue, command = content.get("slurm"), content["requeue"], content.get("exec")
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
                f"{where}: {error}. It was written by {made_by}, but this is forge {__version__}:"
                " run the sweep's command again with this version, or install the other version."
            ],
            "The job's plan",
        ) from error


def read_earlier(directory: Path) -> EarlierPlan:
    """The plan of an earlier start; missing or damaged fields have their default."""
    content = read_json(forge_dir(directory) / PLAN) or {}
    known: dict[str, Any] = {k: v for k, v in content.items() if isinstance(v, _KINDS.get(k, ()))}
    return EarlierPlan(**known)
