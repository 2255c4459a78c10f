"""The jobs of a batch before any starts: their configs, their directories, what is wrong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf, flag_override, read_write

from forge import messages
from forge.errors import ConfigError, FrozenConfigError
from forge.filesystem.foreign import is_ours
from forge.hydra_app import frozen, hints
from forge.hydra_app.job_policy import policy_of
from forge.jobdir import identity, job_dir
from forge.jobdir.job_files import STATE, forge_dir
from forge.jobdir.plan import read_earlier
from forge.launch import exec, payload, plan
from forge.launch.hydra_launcher import Request
from forge.launch.plan import ComposedJob
from forge.launch.sweep import Place, SweepDir

_SHOWN = 8
"""Jobs that one problem names."""

_LONGEST_NAME = 255
"""Bytes of a file's name, on every file system that clusters have."""


def compose(
    sweep: SweepDir,
    request: Request,
    complete: Callable[[DictConfig], None] = lambda cfg: None,
) -> list[ComposedJob]:
    """Every job's config and directory; all problems of all jobs at once.

    Args:
        sweep: Where they lie.
        request: What Hydra asks for.
        complete: Puts what the launcher's own options say into a job's config.
    """
    jobs: list[ComposedJob] = []
    problems: list[str] = []
    batch: dict[str, Place] = {}
    outer = HydraConfig.instance().cfg
    called = _called(request.function)
    job_overrides = request.job_overrides
    earlier = sweep.of_earlier_batches()
    known = sweep.find_all([list(overrides) for overrides in job_overrides])
    # What all of them have is not what anybody wants to see.
    several = len(job_overrides) > 1
    common = set.intersection(*map(set, job_overrides)) if several else set()
    for index, (overrides, place) in enumerate(zip(job_overrides, known, strict=True)):
        cfg = request.context.config_loader.load_sweep_config(request.config, list(overrides))
        number = place.number if place else sweep.free_number(request.first_number + index)
        shown = [one for one in filter_overrides(overrides) if one not in common]
        label = messages.escape(" ".join(shown))
        try:
            hints.composition_succeeded()
            _set_number(cfg, number)
            place = place or Place(number, str(cfg.hydra.sweep.subdir), tuple(sorted(overrides)))
            text = _shown(cfg)
            composed = hashlib.sha256(text.encode()).hexdigest()
            directory = sweep.path / place.subdir
            program = f"{called} with config {cfg.hydra.job.config_name}"
            written = identity.as_written(cfg)
            job = ComposedJob(place, directory, cfg, None, label, program, composed, written)
            problem = _place_problem(job, sweep, batch)
            if problem:  # not looked into further: what lies there is another job's
                problems.append(f"job {number} ({label}): {problem}")
                continue
            complete(cfg)  # before it is compared with what the job began with
            _settle(job, sweep.path, may_refer="${" in text)
            if request.function is exec.run:
                job.command = exec.command_of(cfg)
            job.policy = policy_of(cfg, is_command=job.command is not None)
            _check_source(job)
        except ConfigError as error:
            problems += [f"job {number} ({label}): {problem}" for problem in error.problems]
            continue
        except FrozenConfigError as error:
            problems.append(f"job {number} ({label}): {error}")
            continue
        finally:
            HydraConfig.instance().cfg = outer
        jobs.append(job)
    problems += _shared_checkpoints(jobs, [(one, sweep.path / one.subdir) for one in earlier])
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "The sweep")
    return jobs


def _check_source(job: ComposedJob) -> None:
    """Raise ConfigError where the job could not begin with what its policy names."""
    if job.policy is not None and job.is_active:
        where = Path(job.config.hydra.runtime.cwd)
        problem = job_dir.init_problem(job.policy.checkpoint, job.directory, where)
        if problem:
            raise ConfigError([problem])


def _shared_checkpoints(
    jobs: list[ComposedJob], earlier: list[tuple[Place, Path]]
) -> Iterator[str]:
    """A sentence for each checkpoint directory that several jobs would save into.

    Args:
        jobs: The batch.
        earlier: Those of the batches before it, which have run, and where they lie.
    """
    users: dict[str, list[tuple[str, str]]] = {}
    for place, path in earlier:
        before = read_earlier(path)
        if before.written is not None:  # its policy is active
            name, configured = f"{place.number} (an earlier batch)", before.checkpoint_dir
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
                f"jobs {', '.join(names[:-1])} and {names[-1]} would all save into {directory}:"
                f" `resilience.checkpoint.dir={sharing[0][1]}`. Make it relative, so that"
                " it lies in each job's own directory, or make it different for each job:"
                " `${hydra:job.num}` or `${hydra:job.override_dirname}`."
            )


def _shown(cfg: DictConfig) -> str:
    """The user's part of a config as a text, interpolations and all."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    return repr({str(key): value for key, value in plain.items() if key != "hydra"})


def _place_problem(job: ComposedJob, sweep: SweepDir, batch: dict[str, Place]) -> str | None:
    """Why a job cannot lie where it would; `batch` has those before it by directory."""
    longest = max(len(os.fsencode(part)) for part in job.directory.parts)
    if longest > _LONGEST_NAME:
        return (
            f"`hydra.sweep.subdir={job.place.subdir}` has a name of {longest} bytes, and that of a"
            f" directory can have {_LONGEST_NAME}. Use `${{hydra.job.num}}`, or leave keys out by"
            " `hydra.job.config.override_dirname.exclude_keys`."
        )
    if os.path.normpath(job.directory) == os.path.normpath(sweep.path):
        return (
            f"`hydra.sweep.subdir={job.place.subdir}` puts it into the sweep's own directory. Each"
            " job needs one of its own, `${hydra.job.num}` for example."
        )
    problem = _way_out(job, sweep)
    if problem:
        return problem
    owner = sweep.owner(job.place.subdir)
    owner = owner or batch.setdefault(sweep.key(job.place.subdir), job.place)
    if owner.number == job.place.number:
        return _stranger(job)
    return (
        f"would be in {job.directory}, which is the directory of job {owner.number}"
        f" ({messages.escape(' '.join(owner.overrides))}). Make it different for each job:"
        " `hydra.sweep.subdir`, `${hydra.job.num}` for example."
    )


def _way_out(job: ComposedJob, sweep: SweepDir) -> str | None:
    """Why it is not its own config that has a job lie outside of the sweep."""
    if Path(sweep.key(job.place.subdir)).is_relative_to(os.path.realpath(sweep.path)):
        return None
    asked = str(job.config.hydra.sweep.subdir)
    if job.place.subdir != asked:
        return (
            f"the sweep's list of jobs puts it into {job.directory}, which is outside of the sweep,"
            f" and `hydra.sweep.subdir={asked}` does not. Remove the line from {sweep.index}, or"
            " choose another `hydra.sweep.dir`."
        )
    for place in (job.directory, *job.directory.parents):
        if place.is_symlink() and not is_ours(os.lstat(place).st_uid, place.parent):
            return (
                f"{place} is a symbolic link that belongs to another user, to"
                f" {os.path.realpath(place)}. Remove the link, or choose another `hydra.sweep.dir`."
            )
        if place == sweep.path:
            break
    return None


def _stranger(job: ComposedJob) -> str | None:
    """Why what lies in the job's directory is another job."""
    before = read_earlier(job.directory)
    overrides = before.overrides
    if overrides is not None and sorted(overrides) != sorted(job.place.overrides):
        return (
            f"would be in {job.directory}, where a job with other overrides was started"
            f" ({messages.escape(' '.join(overrides))}). Choose another `hydra.sweep.dir` or"
            " `hydra.sweep.subdir`."
        )
    if before.program not in (None, job.program):
        return (
            f"{job.directory} holds a job of {before.program}, and this is {job.program}. Choose"
            " another `hydra.sweep.dir`."
        )
    return None


def _called(function: Callable[[Any], Any]) -> str:
    """Script and function, which with the config are what the overrides are overrides of."""
    main = payload.main_module() or {}
    script = main.get("module") or os.path.basename(main.get("path", ""))
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{script if module == '__main__' else module}:{name}"


def _writable(node: Any) -> AbstractContextManager[Any]:
    """With both flags at once: each change of one costs a walk through everything below."""
    return flag_override(node, ["readonly", "struct"], [False, False])


def _set_number(cfg: Any, number: int) -> None:
    hydra = cfg.hydra
    with _writable(hydra):
        hydra.job.num = number
        hydra.job.id = str(number)
    HydraConfig.instance().cfg = cfg  # for `${hydra:…}`; set_config would copy all of it


def _settle(job: ComposedJob, sweep_path: Path, *, may_refer: bool) -> None:
    """Put what is known only now into the job's config, as values: above all its paths.

    `may_refer`: whether there are interpolations in the user's part.
    """
    cfg = job.config
    hydra = cfg.hydra
    with _writable(hydra), _writable(hydra.runtime):
        hydra.sweep.dir = str(sweep_path)
        hydra.sweep.subdir = job.place.subdir
        hydra.runtime.output_dir = str(job.directory)
    if frozen.is_frozen(job.directory):
        if plan.has_begun(job.directory):
            if not frozen.wants_change(cfg):
                frozen.restore(cfg, job.directory)
            may_refer = True
        elif not plan.is_finished(job.directory):
            frozen.forget(job.directory)  # nothing was trained yet: nothing to be true to
            job_dir.forget_code(job.directory)
    if may_refer:
        with read_write(cfg):
            frozen.resolve_now(cfg, job.directory)


def is_stale(job: ComposedJob, code: dict[str, str]) -> bool:
    """Whether a finished job runs again.

    One with a policy never does: its state is all it would come back to. One without, that knows
    nothing of states, does where the code or the config has changed, as with Hydra's own launcher.

    `code`: as `job_dir.code_fingerprint` has it now.
    """
    changed = job_dir.changed_code(job.directory, code)
    if not changed and (job.is_active or read_earlier(job.directory).composed == job.composed):
        return False
    if job.is_active:
        messages.warn(f"{job.directory} was finished with other code: {', '.join(changed[:5])}")
        return False
    return True


def start_over(job: ComposedJob) -> None:
    """Let a finished job run again, with the code as it is now."""
    job_dir.forget_code(job.directory)
    (forge_dir(job.directory) / STATE).unlink(missing_ok=True)
