"""A job as it is started: what the launcher decides, and its wrapper, watch and task go by.

`<job dir>/.forge/plan.json` holds it; for a job on a cluster the bundle of its submission does
until the wrapper takes it out. Written and read here alone. One of another version of forge is read
where it has all that this one needs and nothing that it does not know, else refused by name.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from forge._version import __version__
from forge.errors import ConfigError
from forge.jobdir.job_files import PLAN, forge_dir, read_json, write_json


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """How the step of a job on a cluster is started."""

    ranks: int
    """Tasks of the step."""
    start: list[str]
    """What begins the watch of each rank, in the container where there is one."""
    srun_args: list[str]
    kill_wait_s: float
    """Slurm's KillWait: from its SIGTERM at the limit to its SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Everything that a job's processes need to know of it."""

    overrides: list[str]
    command: list[str]
    """The task."""
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
    lead_s: float
    timeout_s: float
    actions: dict[str, str]
    requeue: dict[str, Any]
    """Limits, as `forge.job.requeue.decide` takes them."""
    written: dict[str, Any] | None = None
    """The config as it was written, for the job's identity; None: without a policy."""
    slurm: SlurmPlan | None = None
    """None: not on a cluster."""
    launch: str = ""
    """The bundle that it was taken out of; a later one has a higher name."""
    version: str = __version__
    """Of the forge that made it."""

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
    slurm = content.get("slurm")
    problem = _problem(JobPlan, {**content, "slurm": None})
    if problem is None and slurm is not None:
        problem = _problem(SlurmPlan, slurm) if isinstance(slurm, dict) else "`slurm` is no object"
    if problem is not None:
        version = content.get("version")
        made_by = f"forge {version}" if version else "an earlier version of forge"
        raise ConfigError(
            [
                f"{where}: {problem}. It was written by {made_by}, and this is forge"
                f" {__version__}: start the sweep again with this one, or go back to the other."
            ],
            "The job's plan",
        )
    return JobPlan(**{**content, "slurm": None if slurm is None else SlurmPlan(**slurm)})


def read_earlier(directory: Path) -> EarlierPlan:
    """What is known of an earlier start; what is damaged, or was not there yet, is the default."""
    content = read_json(forge_dir(directory) / PLAN) or {}
    hints = get_type_hints(EarlierPlan)
    return EarlierPlan(**{k: v for k, v in content.items() if k in hints and _fits(v, hints[k])})


def _problem(kind: type, content: dict[str, Any]) -> str | None:
    """The first thing that keeps `content` from being the fields of `kind`, in words."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        if one.name not in content:
            if one.default is MISSING and one.default_factory is MISSING:
                return f"`{one.name}` is missing"
        elif one.name != "slurm" and not _fits(content[one.name], hints[one.name]):
            return f"`{one.name}` is {content[one.name]!r}: expected {one.type}"
    unknown = sorted(content.keys() - hints.keys())
    return f"`{unknown[0]}` is not known" if unknown else None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of this type."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inside)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inside[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(_fits(v, inside[1]) for v in value.values())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)
