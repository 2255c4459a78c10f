"""Composes the configs of a batch's jobs, and checks all of them before any job starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override, read_write

from forge import messages
from forge.compat import of_omegaconf
from forge.errors import ConfigError, FrozenConfigError
from forge.filesystem.foreign import is_ours
from forge.hydra_app import frozen, hints
from forge.hydra_app.job_policy import policy_of
from forge.jobdir import code as job_code
from forge.jobdir import flat_config, job_state
from forge.jobdir.job_files import STATE, forge_dir, is_busy
from forge.jobdir.plan import read_earlier
from forge.launch import exec, payload, planning
from forge.launch.hydra_launcher import Request
from forge.launch.planning import ComposedJob
from forge.launch.sweep import SweepDir
from forge.sweeps.reader import JobPlace

_SHOWN = 8
"""The most jobs that an error message names."""

_LONGEST_NAME = 255
"""The longest name of a file in bytes, on the file systems of clusters."""


def compose(
    sweep: SweepDir,
    request: Request,
    complete: Callable[[DictConfig], None] = lambda cfg: None,
) -> list[ComposedJob]:
    """Compose every job's config and directory; raises all problems of all jobs together.

    Args:
        sweep: The directory of the sweep.
        request: The batch, as Hydra passed it.
        complete: Puts the launcher's own options into a job's config.
    """
    jobs: list[ComposedJob] = []
    problems: list[str] = []
    batch: dict[str, JobPlace] = {}
    outer = HydraConfig.instance().cfg
    program = f"{_called(request.function)} with config {request.config.hydra.job.config_name}"
    job_overrides = request.job_overrides
    earlier = [(one, "an earlier batch") for one in sweep.of_earlier_batches()]
    known = sweep.find_all([list(overrides) for overrides in job_overrides])
    done = {
        place.number
        for place, overrides in zip(known, job_overrides, strict=True)
        if place is not None and _is_done(sweep, place, overrides, program)
    }
    # Labels show only the overrides that differ between jobs.
    several = len(job_overrides) > 1
    common = set.intersection(*map(set, job_overrides)) if several else set()
    for index, (overrides, place) in enumerate(zip(job_overrides, known, strict=True)):
        shown = [one for one in filter_overrides(overrides) if one not in common]
        label = messages.escape(" ".join(shown))
        if place is not None and place.number in done:
            jobs.append(ComposedJob.done(place, sweep.path / place.subdir, label, program))
            earlier.append((place, "finished"))
            continue
        cfg = request.context.config_loader.load_sweep_config(request.config, overrides)
        number = place.number if place else sweep.free_number(request.first_number + index)
        try:
            hints.composition_succeeded()
            _set_number(cfg, number)
            place = place or JobPlace(number, str(cfg.hydra.sweep.subdir), tuple(sorted(overrides)))
            plain = plain_of(cfg)
            text = repr(plain)
            composed = hashlib.sha256(text.encode()).hexdigest()
            directory = sweep.path / place.subdir
            written = flat_config.flat(plain)[0]
            job = ComposedJob(place, directory, cfg, None, label, program, composed, written)
            problem = _place_problem(job, sweep, batch)
            if problem:  # no further checks: the files in the directory belong to another job
                problems.append(f"job {number} ({label}): {problem}")
                continue
            complete(cfg)  # before the comparison with the config of the job's first start
            _settle(job, sweep.path, may_refer="${" in text)
            if request.function is exec.run:
                job.command = exec.command_of(cfg)
            job.policy = policy_of(cfg, is_command=job.command is not None)
        except ConfigError as error:
            problems += [f"job {number} ({label}): {problem}" for problem in error.problems]
            continue
        except FrozenConfigError as error:
            problems.append(f"job {number} ({label}): {error}")
            continue
        finally:
            HydraConfig.instance().cfg = outer
        jobs.append(job)
    problems += _shared_checkpoints(jobs, sweep, earlier)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "The sweep")
    return jobs


def _is_done(sweep: SweepDir, place: JobPlace, overrides: list[str], program: str) -> bool:
    """Whether this job was finished under a policy: it never runs again."""
    directory = sweep.path / place.subdir
    if not job_state.is_finished(directory) or not _is_inside(sweep, place):
        return False
    before = read_earlier(directory)
    is_same = before.program == program and sorted(before.overrides or ()) == sorted(overrides)
    return is_same and before.written is not None  # otherwise it had no active policy


def _shared_checkpoints(
    jobs: list[ComposedJob], sweep: SweepDir, earlier: list[tuple[JobPlace, str]]
) -> Iterator[str]:
    """An error for each checkpoint directory that several jobs would save to.

    Args:
        jobs: The jobs of this batch.
        sweep: Their sweep.
        earlier: Jobs that are not composed, since they have run: each with when.
    """
    users: dict[str, list[tuple[str, str]]] = {}
    for place, when in earlier:
        path = sweep.path / place.subdir
        before = read_earlier(path)
        if before.written is not None:  # its policy is active
            name, configured = f"{place.number} ({when})", before.checkpoint_dir
            users.setdefault(os.path.realpath(path / configured), []).append((name, configured))
    for job in jobs:
        if job.policy is not None and job.policy.enabled:
            name, configured = f"{job.place.number} ({job.label})", job.policy.checkpoint.dir
            directory = os.path.realpath(job.directory / configured)
            users.setdefault(directory, []).append((name, configured))
    for directory, sharing in users.items():
        if len(sharing) > 1:
            names = [name for name, _ in sharing[:_SHOWN]]
            names += [f"{len(sharing) - _SHOWN} more"] if len(sharing) > _SHOWN else []
            yield (
                f"jobs {', '.join(names[:-1])} and {names[-1]} would all save to {directory}:"
                f" `resilience.checkpoint.dir={sharing[0][1]}`. Make it relative, so that each"
                " job saves in its own directory, or make it different for each job:"
                " `${hydra:job.num}` or `${hydra:job.override_dirname}`."
            )


def plain_of(cfg: DictConfig) -> dict[str, Any]:
    """The user's part of a config as plain values, with unresolved interpolations."""
    found: dict[str, Any] = {}
    for key in cfg:
        if key != "hydra":
            node = of_omegaconf.child_of(cfg, key)
            is_tree = isinstance(node, (DictConfig, ListConfig))
            value = OmegaConf.to_container(node) if is_tree else of_omegaconf.value_of(node)
            found[str(key)] = value
    return found


def _place_problem(job: ComposedJob, sweep: SweepDir, batch: dict[str, JobPlace]) -> str | None:
    """Why a job cannot use its directory; `batch` has the earlier jobs of this batch."""
    longest = max(len(os.fsencode(part)) for part in job.directory.parts)
    if longest > _LONGEST_NAME:
        return (
            f"`hydra.sweep.subdir={job.place.subdir}` has a name of {longest} bytes, and the limit"
            f" for a directory is {_LONGEST_NAME}. Use `${{hydra.job.num}}`, or leave keys out with"
            " `hydra.job.config.override_dirname.exclude_keys`."
        )
    if os.path.normpath(job.directory) == os.path.normpath(sweep.path):
        return (
            f"`hydra.sweep.subdir={job.place.subdir}` is the sweep's own directory. Each job needs"
            " a directory of its own, `${hydra.job.num}` for example."
        )
    problem = _way_out(job, sweep)
    if problem:
        return problem
    owner = sweep.owner(job.place.subdir)
    owner = owner or batch.setdefault(sweep.key(job.place.subdir), job.place)
    if owner.number == job.place.number:
        return _stranger(job)
    return (
        f"its directory would be {job.directory}, which is the directory of job {owner.number}"
        f" ({messages.escape(' '.join(owner.overrides))}). Make `hydra.sweep.subdir` different for"
        " each job, `${hydra.job.num}` for example."
    )


def _way_out(job: ComposedJob, sweep: SweepDir) -> str | None:
    """Why a job's directory is outside of the sweep, although its config did not ask for that."""
    if _is_inside(sweep, job.place):
        return None
    asked = str(job.config.hydra.sweep.subdir)
    if job.place.subdir != asked:
        return (
            f"{sweep.index} lists {job.directory} as this job's directory, but that is outside of"
            f" the sweep's directory, and `hydra.sweep.subdir` gives {asked}. Remove this line from"
            f" {sweep.index}, or choose another `hydra.sweep.dir`."
        )
    for place in (job.directory, *job.directory.parents):
        if place.is_symlink() and not is_ours(os.lstat(place).st_uid, place.parent):
            return (
                f"{place} is a symbolic link to {os.path.realpath(place)}, and the link belongs to"
                " another user. Remove the link, or choose another `hydra.sweep.dir`."
            )
        if place == sweep.path:
            break
    return None


def _is_inside(sweep: SweepDir, place: JobPlace) -> bool:
    """Whether the directory of a job is below the directory of the sweep."""
    return Path(sweep.key(place.subdir)).is_relative_to(os.path.realpath(sweep.path))


def _stranger(job: ComposedJob) -> str | None:
    """Why the files in the job's directory belong to another job."""
    before = read_earlier(job.directory)
    overrides = before.overrides
    if overrides is not None and sorted(overrides) != sorted(job.place.overrides):
        return (
            f"its directory {job.directory} already has a job with other overrides"
            f" ({messages.escape(' '.join(overrides))}). Choose another `hydra.sweep.dir` or"
            " `hydra.sweep.subdir`."
        )
    if before.program not in (None, job.program):
        return (
            f"{job.directory} contains a job of {before.program}, and this job is of {job.program}."
            " Choose another `hydra.sweep.dir`."
        )
    return None


def _called(function: Callable[[Any], Any]) -> str:
    """Script and function, which identify the program together with the config's name."""
    main = payload.main_module() or {}
    script = main.get("module") or os.path.basename(main.get("path", ""))
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{script if module == '__main__' else module}:{name}"


def _writable(node: Any) -> AbstractContextManager[Any]:
    """Changes both flags in one call, since each call walks through all nodes below."""
    return flag_override(node, ["readonly", "struct"], [False, False])


def _set_number(cfg: Any, number: int) -> None:
    hydra = cfg.hydra
    with _writable(hydra):
        hydra.job.num = number
        hydra.job.id = str(number)
    HydraConfig.instance().cfg = cfg  # for `${hydra:…}`; set_config would copy all of it


def _settle(job: ComposedJob, sweep_path: Path, *, may_refer: bool) -> None:
    """Set the values of the job's config that are known only now, mainly paths.

    `may_refer`: whether the user's part can contain interpolations.
    """
    cfg = job.config
    hydra = cfg.hydra
    with _writable(hydra), _writable(hydra.runtime):
        hydra.sweep.dir = str(sweep_path)
        hydra.sweep.subdir = job.place.subdir
        hydra.runtime.output_dir = str(job.directory)
    if frozen.is_frozen(job.directory):
        if planning.has_begun(job.directory) or is_busy(job.directory):
            if not frozen.wants_change(cfg):
                frozen.restore(cfg, job.directory)
            may_refer = True
        else:
            job.has_new_config = not job_state.is_finished(job.directory)
    if may_refer:
        with read_write(cfg):
            frozen.resolve_now(cfg, job.directory)


def is_stale(job: ComposedJob, code: dict[str, str]) -> bool:
    """Whether a finished job runs again.

    A job with an active policy never does: it would only resume its final state. A job without one
    runs again if the code or the config has changed, as with Hydra's own launcher.

    `code`: the result of `code.fingerprint`.
    """
    changed = job_code.changed(job.directory, code)
    is_kept = job.is_active or job.is_done
    if not changed and (is_kept or read_earlier(job.directory).composed == job.composed):
        return False
    if is_kept:
        messages.warn(
            f"The job in {job.directory} is finished, so it does not run again, although its code"
            f" has changed since: {', '.join(changed[:5])}"
        )
        return False
    return True


def use_new_config(job: ComposedJob) -> None:
    """Prepare a job that has trained nothing to start with its config and the code of now."""
    if job.has_new_config:
        frozen.forget(job.directory)
        job_code.forget(job.directory)


def start_over(job: ComposedJob) -> None:
    """Prepare a finished job to run again, with the current code."""
    job_code.forget(job.directory)
    (forge_dir(job.directory) / STATE).unlink(missing_ok=True)
