"""`forge resume` of a sweep of `hydra/launcher=local`: its queue, with the jobs on disk."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge import messages
from forge.jobdir import cancel_request, jsonl, plan
from forge.jobdir.job_files import STATE, forge_dir, job_ledger
from forge.jobdir.job_state import State
from forge.launch import snapshot
from forge.launch.again import choose
from forge.launch.local import resources
from forge.launch.local.queue import Queue, QueuedJob
from forge.launch.progress import display
from forge.launch.progress.observed import how_to_resume
from forge.launch.record import LaunchRecord
from forge.launch.sweep import SweepDir
from forge.sweeps.job import SweepJob


def run(
    path: Path, jobs: Sequence[SweepJob], launched: LaunchRecord, changes: dict[str, Any]
) -> int:
    """Run the jobs to their end; returns the exit code.

    Args:
        path: The sweep's directory.
        jobs: The jobs to start.
        launched: The last launch of the sweep.
        changes: Options of the launcher that replace those of the last launch.
    Raises:
        DirectoryInUse: If a launcher runs the sweep.
        ConfigError: If an option or a plan cannot be used.
    """
    options = resources.options(launched.options | changes)
    slots = resources.slots(options)
    with closing(SweepDir(path, set())):
        jobs = list(choose.not_finished(jobs))
        for job in jobs:  # a request that comes from now on counts
            cancel_request.clear(job.directory)
        launched = replace(launched, options=launched.options | changes)
        plans = [(job, _plan(job, path, launched, options, changes)) for job in jobs]
        choose.warn_of_changed_code(plans)
        launched.write(path)
        for job, made in plans:
            (forge_dir(job.directory) / STATE).unlink(missing_ok=True)
            made.write(job.directory)
            jsonl.append(job_ledger(job.directory), "resumed", changes=changes)
        queued = [QueuedJob(job.number, job.label, job.directory) for job in jobs]
        title = display.title(path, (job.overrides for job in jobs))
        queue = Queue(queued, slots, display.Display(mode=options.progress, title=title))
        stopped_by = queue.run()
    if how := how_to_resume(queued, f"forge resume {shlex.quote(str(path))}"):
        messages.say(how)
    if stopped_by is not None:
        return 128 + stopped_by
    return 0 if all(job.state is State.finished for job in queued) else 1


def _plan(
    job: SweepJob,
    path: Path,
    launched: LaunchRecord,
    options: resources.LocalOptions,
    changes: dict[str, Any],
) -> plan.JobPlan:
    """The job's plan, with the launcher's options of now."""
    made = plan.read(job.directory)
    before = Path(launched.path or path) / job.directory.relative_to(path)
    made = snapshot.moved(choose.moved(made, before, job.directory), path)
    if "timeout_min" in changes:
        made = replace(made, time_limit_s=options.time_limit_s)
    if "tasks_per_job" in changes:
        made = replace(made, tasks=options.tasks_per_job)
    return made
