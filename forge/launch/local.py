"""`hydra/launcher=local`: one batch of a sweep, from its overrides to what its jobs returned."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from forge import config, frozen, job_dir, messages
from forge.config import Policy
from forge.errors import ConfigError, Exit, ExitCode, ForgeError, JobError, JobTraceback
from forge.job_files import RESULT, STATE, TASK, forge_dir, read_trusted, write_atomically
from forge.launch import orphans, payload, plan, resources
from forge.launch.queue import Queue, QueuedJob
from forge.launch.sweep import Place, SweepDir
from forge.launch.view import State

log = logging.getLogger(__name__)


@dataclass
class _Job:
    """One job of the batch, composed."""

    place: Place
    directory: Path
    config: DictConfig
    policy: Policy | None
    label: str
    """Its overrides, for people."""
    program: str
    composed: str
    """sha256 of its config as it was composed."""


def launch(
    given: dict[str, Any],
    context: Any,
    function: Callable[[Any], Any],
    sweep_config: DictConfig,
    job_overrides: list[list[str]],
    first_number: int,
    taken: set[int],
) -> list[JobReturn]:
    """Run a batch to its end.

    Args:
        given: The options of the launcher.
        context: Hydra's context.
        function: The user's main.
        sweep_config: The config of the sweep, composed by Hydra.
        job_overrides: The task overrides of each job.
        first_number: Hydra's number of the first job.
        taken: Numbers of the jobs that this launcher has run before; changed.
    Raises:
        SystemExit: 78 where something is wrong before the first job starts, 73 where another
            launcher runs this sweep, 130 or 143 after a stop.
    """
    if sys.platform == "win32":
        raise ForgeError("hydra/launcher=local needs POSIX signals and locks. Use WSL, or Linux.")
    setup_globals()
    configure_log(sweep_config.hydra.hydra_logging, sweep_config.hydra.verbose)
    directory = Path(str(sweep_config.hydra.sweep.dir)).absolute()
    try:
        options = resources.options(given)
        slots = resources.slots(options)
        directory.mkdir(parents=True, exist_ok=True)
        if "mode" in sweep_config.hydra.sweep and sweep_config.hydra.sweep.mode is not None:
            directory.chmod(int(str(sweep_config.hydra.sweep.mode), 8))
        sweep = SweepDir(directory, taken)
    except ForgeError as error:
        raise _refused(error) from error
    except (OSError, ValueError) as error:
        raise _refused(_unusable(directory, error)) from error
    try:
        jobs = _compose(
            sweep, function, context, sweep_config, job_overrides, first_number, options
        )
        sweep.add([job.place for job in jobs])
        orphans.wait_for([job.directory for job in jobs])
        _freeze(jobs, payload.Shared(function, context), options)
        queued = [QueuedJob(j.place.number, j.label, j.directory) for j in jobs]

        command = job_dir.sweep_command(directory)
        job_dir.write_resume_script(directory, command)
        log.info(f"Launching {len(jobs)} jobs, {slots.count} at a time, in {directory}")
        log.info(f"To go on with this sweep after a stop:\n  {command}")
        queue = Queue(queued, slots, options.progress)
        stopped_by = queue.run()
    except ForgeError as error:
        raise _refused(error) from error
    except OSError as error:
        raise _refused(_unusable(directory, error)) from error
    finally:
        sweep.close()
    if stopped_by is not None:
        messages.say(f"The sweep was stopped. To go on with it:\n  {command}")
        name = signal.Signals(stopped_by).name
        raise Exit(128 + stopped_by, f"the sweep was stopped by {name}")
    results = [_result(job, one) for job, one in zip(jobs, queued, strict=True)]
    if any(result.status is JobStatus.FAILED for result in results):
        messages.say(f"To run again what did not finish:\n  {command}")
    return results


def _unusable(directory: Path, error: Exception) -> ConfigError:
    problem = f"`hydra.sweep.dir={directory}`: cannot be used: {error}. Choose another directory."
    return ConfigError([problem], "The launcher's configuration")


def _refused(error: ForgeError) -> Exit:
    messages.say(str(error), logging.ERROR)
    return Exit(error.exit_code, str(error))


# -- before the first job starts ---------------------------------------------------------------


def _compose(
    sweep: SweepDir,
    function: Callable[[Any], Any],
    context: Any,
    sweep_config: DictConfig,
    job_overrides: list[list[str]],
    first_number: int,
    options: resources.LocalOptions,
) -> list[_Job]:
    """Every job's config and directory; all problems of all jobs at once."""
    jobs: list[_Job] = []
    problems: list[str] = []
    outer = HydraConfig.instance().cfg
    known = [sweep.find(overrides) for overrides in job_overrides]
    # What all of them have is not what anybody wants to see.
    several = len(job_overrides) > 1
    common = set.intersection(*map(set, job_overrides)) if several else set()
    for index, (overrides, place) in enumerate(zip(job_overrides, known, strict=True)):
        cfg = context.config_loader.load_sweep_config(sweep_config, list(overrides))
        number = place.number if place else sweep.free_number(first_number + index)
        shown = [one for one in filter_overrides(overrides) if one not in common]
        label = " ".join(shown)
        try:
            place = place or Place(number, _subdir(cfg, number), tuple(sorted(overrides)))
            text = OmegaConf.to_yaml(_task_part(cfg))
            composed = hashlib.sha256(text.encode()).hexdigest()
            directory, program = sweep.path / place.subdir, _program(function, cfg)
            job = _Job(place, directory, cfg, None, label, program, composed)
            problem = _place_problem(job, sweep, jobs)
            if problem:  # not looked into any more: what lies there is another job's
                problems.append(f"job {number} ({label}): {problem}")
                continue
            _settle(job, sweep.path)
            job.policy = _policy(cfg, options)
        except ConfigError as error:
            problems += [f"job {number} ({label}): {problem}" for problem in error.problems]
            continue
        except frozen.Contradiction as error:
            problems.append(f"job {number} ({label}): {error}")
            continue
        finally:
            HydraConfig.instance().cfg = outer
        jobs.append(job)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "The sweep")
    return jobs


def _place_problem(job: _Job, sweep: SweepDir, jobs: list[_Job]) -> str | None:
    """Why a job cannot lie where it would."""
    if os.path.normpath(job.directory) == os.path.normpath(sweep.path):
        return (
            f"`hydra.sweep.subdir={job.place.subdir}` puts it into the sweep's own directory. Each"
            " job needs one of its own, `${hydra.job.num}` for example."
        )
    subdir = job.place.subdir
    of_this_batch = (one.place for one in jobs if sweep.is_same(one.place.subdir, subdir))
    owner = sweep.owner(subdir) or next(of_this_batch, None)
    if owner is None or owner.number == job.place.number:
        return _stranger(job)
    return (
        f"would lie in {job.directory}, which is the directory of job {owner.number}"
        f" ({' '.join(owner.overrides)}). Put what differs into `hydra.sweep.subdir`,"
        " `${hydra.job.num}` for example."
    )


def _stranger(job: _Job) -> str | None:
    """Why what lies in the job's directory is another job."""
    before = plan.earlier(job.directory)
    overrides = before.get("overrides", list(job.place.overrides))
    if sorted(overrides) != sorted(job.place.overrides):
        return (
            f"would lie in {job.directory}, where a job with other overrides was started"
            f" ({' '.join(overrides)}). Choose another `hydra.sweep.dir` or `hydra.sweep.subdir`."
        )
    if before.get("program", job.program) != job.program:
        return (
            f"{job.directory} holds a job of {before['program']}, and this is {job.program}. Choose"
            " another `hydra.sweep.dir`."
        )
    return None


def _task_part(cfg: DictConfig) -> DictConfig:
    """The user's part of a config."""
    with read_write(cfg):
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _program(function: Callable[[Any], Any], cfg: DictConfig) -> str:
    """What the overrides are overrides of: script, function, config."""
    main = payload.main_module() or {}
    script = main.get("module") or os.path.basename(main.get("path", ""))
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", type(function).__name__)
    where = script if module == "__main__" else module
    return f"{where}:{name} with config {cfg.hydra.job.config_name}"


def _subdir(cfg: DictConfig, number: int) -> str:
    with read_write(cfg.hydra), open_dict(cfg):
        cfg.hydra.job.num = number
        cfg.hydra.job.id = str(number)
    HydraConfig.instance().set_config(cfg)
    return str(cfg.hydra.sweep.subdir)


def _settle(job: _Job, sweep_path: Path) -> None:
    """Put what is known only now into the job's config, as values: its number and its paths."""
    cfg = job.config
    with read_write(cfg), open_dict(cfg), read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.num = job.place.number
        cfg.hydra.job.id = str(job.place.number)
        cfg.hydra.sweep.dir = str(sweep_path)
        cfg.hydra.sweep.subdir = job.place.subdir
        with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
            cfg.hydra.runtime.output_dir = str(job.directory)
    HydraConfig.instance().set_config(cfg)
    if frozen.is_frozen(job.directory):
        if plan.has_begun(job.directory):
            frozen.restore(cfg, job.directory)
        elif not plan.is_finished(job.directory):
            frozen.forget(job.directory)  # nothing was trained yet: nothing to be true to
            job_dir.forget_code(job.directory)
    with read_write(cfg):
        frozen.resolve_now(cfg, is_root=True)


def _policy(cfg: DictConfig, options: resources.LocalOptions) -> Policy | None:
    section = OmegaConf.select(cfg, "resilience")
    if section is None:
        return None
    limit_key = f"hydra.launcher.timeout_min={options.timeout_min}"
    return config.load(section, time_limit_s=options.time_limit_s, limit_key=limit_key)


def _freeze(jobs: list[_Job], shared: payload.Shared, options: resources.LocalOptions) -> None:
    """Write down how each job is started, unless it is finished."""
    outer = HydraConfig.instance().cfg
    for job in jobs:
        if plan.is_finished(job.directory) and not _is_stale(job):
            continue
        HydraConfig.instance().set_config(job.config)
        try:
            forge_dir(job.directory).mkdir(0o775, parents=True, exist_ok=True)
            (forge_dir(job.directory) / STATE).unlink(missing_ok=True)
            if job.policy is not None and job.policy.enabled:
                frozen.freeze(job.config, job.directory)
            job_dir.changed_code(job.directory)  # the first start notes it
            data, main = shared.with_config(job.config)
            write_atomically(forge_dir(job.directory) / TASK, data)
            plan.make(
                job.directory,
                list(job.place.overrides),
                job.policy,
                main,
                options.time_limit_s,
                options.cpus_per_job,
                dict(os.environ),
                job.program,
                job.composed,
            ).materialize(job.directory)
        finally:
            HydraConfig.instance().cfg = outer


def _is_stale(job: _Job) -> bool:
    """Whether a finished job runs again.

    One with a policy never does: its state is all it would come back to. One without, that knows
    nothing of states, does where the code or the config has changed, as with Hydra's own launcher.
    """
    changed = job_dir.changed_code(job.directory)
    is_active = job.policy is not None and job.policy.enabled
    if not changed and (is_active or plan.earlier(job.directory).get("composed") == job.composed):
        return False
    if is_active:
        messages.warn(f"{job.directory} was finished with other code: {', '.join(changed[:5])}")
        return False
    job_dir.forget_code(job.directory)
    return True


# -- after the last has ended ------------------------------------------------------------------


def _result(job: _Job, queued: QueuedJob) -> JobReturn:
    """What the job's main returned or raised; a JobError where neither is known."""
    result: JobReturn | None = None
    if queued.state is State.finished or queued.reason == "failed":
        result = _stored(job.directory)
    if result is None:
        result = JobReturn(status=JobStatus.COMPLETED)
        if queued.state is not State.finished:
            text = f"job {job.place.number} ({job.label}): {queued.because}"
            text += plan.last_output(job.directory)
            result.status = JobStatus.FAILED
            result.return_value = JobError(text, queued.code)
    result.overrides = list(OmegaConf.to_container(job.config.hydra.overrides.task, resolve=False))  # type: ignore[arg-type]
    if result.cfg is None:
        result.cfg = _task_part(job.config)
        result.hydra_cfg = OmegaConf.masked_copy(job.config, ["hydra"])
        result.working_dir = str(job.directory)
        result.task_name = job.config.hydra.job.name
    return result


def _stored(directory: Path) -> JobReturn | None:
    path = forge_dir(directory) / RESULT
    # The job imported our `__main__` under this name, as multiprocessing does.
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
    try:
        found, shown = pickle.loads(read_trusted(path))
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - unpickling runs the user's classes
        text = f"{path} cannot be read ({type(error).__name__}: {error})"
        return JobReturn(
            status=JobStatus.FAILED, _return_value=JobError(text, int(ExitCode.IO_ERROR))
        )
    assert isinstance(found, JobReturn)
    if shown:
        found._return_value.__cause__ = JobTraceback(shown)  # no pickle of an error keeps one
    return found
