"""`hydra/launcher=local`: one batch of a sweep, from its overrides to the results of its jobs."""

from __future__ import annotations

import logging
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn

from forge import messages
from forge.errors import Exit, ExitCode, Reason
from forge.filesystem.files import make_trusted_directory
from forge.hydra_app import frozen
from forge.job.job import Trainings
from forge.jobdir import cancel_request, job_dir, job_state
from forge.jobdir import code as job_code
from forge.jobdir.job_files import STATE, TASK, forge_dir, write_atomically
from forge.jobdir.plan import RequeueLimits
from forge.launch import opening, payload, planning, snapshot
from forge.launch.compose import compose, is_stale, start_over, use_new_config
from forge.launch.hydra_launcher import Request
from forge.launch.local import resources
from forge.launch.local.queue import LIMIT, Queue, QueuedJob
from forge.launch.planning import ComposedJob
from forge.launch.progress import display
from forge.launch.progress.observed import how_to_resume
from forge.launch.record import LaunchRecord
from forge.launch.results import result_of
from forge.slurm import batch_job
from forge.slurm.batch_job import BatchJob, Work

log = logging.getLogger(__name__)


def launch(request: Request) -> list[JobReturn]:
    """Run a batch to its end.

    Raises:
        SystemExit: 78 for an error before the first job starts, 73 if another launcher runs this
            sweep, 129, 130 or 143 after a stop.
    """
    with opening.exit_on_error(request.config) as directory:
        options = resources.options(request.options)
        slots = resources.slots(options)
        sweep = opening.sweep_dir(directory, request)
        try:
            jobs = compose(sweep, request)
            for job in jobs:  # one that comes from now on counts
                cancel_request.clear(job.directory)
            sweep.add([job.place for job in jobs])
            copy = snapshot.make(directory) if options.snapshot else None
            _freeze(jobs, payload.Shared(request.function, request.context, copy), options)
            queued = [QueuedJob(j.place.number, j.label, j.directory) for j in jobs]
            LaunchRecord.of("local", options, copy).write(directory)
            command = job_dir.sweep_command(directory)
            job_dir.write_resume_script(directory, command)
            batch = _batch_job(directory, jobs)
            command = command if batch is None else batch.command
            place = messages.escape(str(directory))
            log.info(f"Launching {len(jobs)} jobs, {slots.count} at a time, in {place}")
            log.info(f"To resume this sweep after a stop:\n  {command}")
            stops_at = math.inf if batch is None else batch.stops_at
            title = display.title(directory, (job.place.overrides for job in jobs))
            shown = display.Display(mode=options.progress, title=title)
            queue = Queue(queued, slots, shown, stops_at)
            stopped_by = queue.run()
        finally:
            sweep.close()
    if stopped_by is not None:
        code = int(ExitCode.REQUEUE) if stopped_by in LIMIT else 128 + stopped_by
        how = how_to_resume(queued, command) if batch is None else ""
        messages.say(f"The sweep was stopped. {how}".rstrip())
        if batch is not None:  # every job has saved and exited
            code = batch.requeue(code, Reason.of_code(code))
        raise Exit(code, f"the sweep was stopped by {signal.Signals(stopped_by).name}")
    results = [result_of(job, one) for job, one in zip(jobs, queued, strict=True)]
    if how := how_to_resume(queued, command):
        messages.say(how)
    return results


def _batch_job(directory: Path, jobs: list[ComposedJob]) -> BatchJob | None:
    """The Slurm job that this whole sweep runs in, unless another part of forge requeues it."""
    policies = [job.policy for job in jobs if job.policy is not None and job.policy.enabled]
    if not policies:
        return None
    work = Work(
        RequeueLimits.of(policies[0].requeue),
        max(one.signal.warning_s for one in policies),
        Trainings([job.directory for job in jobs], policies[0].checkpoint.dir),
        is_command=any(job.command is not None for job in jobs),
    )
    return batch_job.here(directory, work)


def _freeze(
    jobs: list[ComposedJob], shared: payload.Shared, options: resources.LocalOptions
) -> None:
    """Write the config and the plan of each job that is not finished."""
    outer = HydraConfig.instance().cfg
    code = job_code.fingerprint()
    for job in jobs:
        if job_state.is_finished(job.directory):
            if not is_stale(job, code):
                continue
            start_over(job)
        use_new_config(job)
        config: Any = job.config
        HydraConfig.instance().cfg = config  # set_config would copy all of it
        try:
            make_trusted_directory(forge_dir(job.directory))
            (forge_dir(job.directory) / STATE).unlink(missing_ok=True)
            if job.is_active and job.command is None:  # a command is kept in the job's plan
                frozen.freeze(job.config, job.directory, job.written)
            job_code.changed(job.directory, code)  # the first start records it
            data, main = shared.with_config(job.config)
            write_atomically(forge_dir(job.directory) / TASK, data)
            tasks = options.tasks_per_job
            threads = max(options.cpus_per_job // tasks, 1)
            made = planning.make(job, main, options.time_limit_s, threads, tasks)
            made = shared.snapshot.apply(made) if shared.snapshot else replace(made, code=code)
            made.write(job.directory)
        finally:
            HydraConfig.instance().cfg = outer
