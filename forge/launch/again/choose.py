"""Which jobs `forge resume` starts, and with which options of the launcher.

The jobs run in their directories with the configs that were frozen when the sweep was launched:
nothing is composed, and a config that was edited since has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from forge import messages
from forge.errors import ConfigError, Reason
from forge.jobdir import code, job_state
from forge.jobdir.job_state import State
from forge.jobdir.plan import JobPlan
from forge.sweeps.job import SweepJob

_BY_A_PERSON = (Reason.cancelled.name,)
_FAILED = (State.failed, State.lost)
_PREFIX = "hydra.launcher."
_SHOWN = 5


def not_finished(jobs: Iterable[SweepJob]) -> Iterator[SweepJob]:
    """The jobs without those that have finished since they were chosen, which it names."""
    for job in jobs:
        if job_state.is_finished(job.directory):
            messages.say(f"job {job.number} has finished: nothing to do")
        else:
            yield job


def options_of(launcher: str) -> set[str]:
    """The names of the options of a launcher, `local` or `slurm`."""
    if launcher == "local":
        from forge.launch.local.resources import LocalOptions as Options
    else:
        from forge.launch.slurm.slurm_options import SlurmOptions as Options  # type: ignore[assignment]
    return {one.name for one in fields(Options)} - {"_target_", "snapshot"}  # the copy stays


def changed_options(words: Iterable[str], launcher: str) -> dict[str, Any]:
    """Overrides of the launcher's options: `timeout_min=240` or `hydra.launcher.timeout_min=240`.

    Args:
        words: The overrides.
        launcher: `local` or `slurm`.
    Raises:
        ConfigError: If one is not an option of the launcher.
    """
    names = options_of(launcher)
    found: dict[str, Any] = {}
    problems = []
    for word in words:
        key, _, text = word.partition("=")
        name = key.removeprefix(_PREFIX).removeprefix("resilience.slurm.")
        if name in names:
            found[name] = _value(text)
        elif key.startswith(("resilience.", "hydra")) and not key.startswith(_PREFIX):
            problems.append(
                f"`{word}`: `forge resume` changes only options of the launcher; the policy stays"
                " as it was frozen. Run the sweep's own command with this override instead"
                " (`.forge/resume.sh` in its directory has the command)."
            )
        else:
            shown = messages.truncate_list(sorted(names), _SHOWN)
            problems.append(f"`{word}`: expected an option of the launcher ({shown}).")
    if problems:
        raise ConfigError(problems, "The command")
    return found


def _value(text: str) -> Any:
    """The value of an override, as YAML reads it."""
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[index,call-overload]


def is_option(word: str) -> bool:
    """Whether a word is an override of an option of a launcher, or of the policy."""
    key, equals, _ = word.partition("=")
    is_named = key.startswith((_PREFIX, "resilience.", "hydra"))
    return bool(equals) and (is_named or key in options_of("local") | options_of("slurm"))


def warn_of_changed_code(plans: Iterable[tuple[SweepJob, JobPlan]]) -> None:
    """Say once which source files have changed since the jobs were launched."""
    by_code: dict[str, tuple[JobPlan, list[int]]] = {}
    for job, made in plans:
        key = json.dumps(made.code, sort_keys=True)
        by_code.setdefault(key, (made, []))[1].append(job.number)
    for made, numbers in by_code.values():
        files = code.changed_files(made.code)
        if files:
            own = messages.truncate_list([one.removeprefix(f"{made.cwd}/") for one in files], 5)
            jobs = messages.truncate_list(list(map(str, numbers)), 8)
            messages.warn(
                f"The code has changed since job {jobs} was launched: {own}. The job resumes with"
                " the new code and its old config."
            )


def moved(made: JobPlan, before: Path, now: Path) -> JobPlan:
    """The plan of a job whose directory was moved.

    Args:
        made: The plan.
        before: The job's directory when the plan was made.
        now: Where it is.
    """
    old, new = str(before), str(now)
    cwd = new if made.cwd == old else made.cwd
    words = [new if word == old else word for word in made.command]
    slurm = made.slurm
    if slurm is not None:
        slurm = replace(slurm, start=[new if word == old else word for word in slurm.start])
    return replace(made, command=words, cwd=cwd, slurm=slurm)
