"""`hydra/launcher=local`: one batch of a sweep, from its overrides to what its jobs returned."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from omegaconf import DictConfig

from forge import frozen, job_dir, messages
from forge.errors import ConfigError, Exit, ForgeError
from forge.job_files import STATE, TASK, forge_dir, write_atomically
from forge.launch import orphans, payload, plan, resources
from forge.launch.compose import ComposedJob, compose
from forge.launch.queue import Queue, QueuedJob
from forge.launch.results import result_of
from forge.launch.sweep import SweepDir

log = logging.getLogger(__name__)


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
        jobs = compose(sweep, function, context, sweep_config, job_overrides, first_number, options)
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
    results = [result_of(job, one) for job, one in zip(jobs, queued, strict=True)]
    if any(result.status is JobStatus.FAILED for result in results):
        messages.say(f"To run again what did not finish:\n  {command}")
    return results


def _unusable(directory: Path, error: Exception) -> ConfigError:
    problem = f"`hydra.sweep.dir={directory}`: cannot be used: {error}. Choose another directory."
    return ConfigError([problem], "The launcher's configuration")


def _refused(error: ForgeError) -> Exit:
    messages.say(str(error), logging.ERROR)
    return Exit(error.exit_code, str(error))


def _freeze(
    jobs: list[ComposedJob], shared: payload.Shared, options: resources.LocalOptions
) -> None:
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


def _is_stale(job: ComposedJob) -> bool:
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
