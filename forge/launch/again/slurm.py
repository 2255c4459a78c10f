"""`forge resume` of a sweep of `hydra/launcher=slurm`: the jobs are submitted again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge import messages
from forge.errors import ConfigError, SlurmRefused
from forge.jobdir import cancel_request, jsonl, plan
from forge.jobdir.job_files import PLAN, STATE, forge_dir, job_ledger
from forge.jobdir.plan import JobPlan
from forge.launch import snapshot
from forge.launch.again import choose
from forge.launch.record import LaunchRecord
from forge.launch.slurm import slurm_options
from forge.launch.slurm.cluster import Cluster
from forge.launch.slurm.launcher import step_plan
from forge.launch.slurm.sbatch import OptionGroup, batches, job_name, log_folder
from forge.launch.slurm.slurm_options import SlurmOptions
from forge.launch.sweep import SweepDir
from forge.slurm import client
from forge.slurm.submitted import Submitted, bundle_paths, submissions, unpack, write_unpacked
from forge.sweeps.job import SweepJob


def run(
    path: Path, jobs: Sequence[SweepJob], launched: LaunchRecord, changes: dict[str, Any]
) -> int:
    """Submit the jobs; returns the exit code.

    Args:
        path: The sweep's directory.
        jobs: The jobs to start.
        launched: The last launch of the sweep.
        changes: Options of the launcher that replace those of the last launch.
    Raises:
        DirectoryInUse: If a launcher runs the sweep.
        ConfigError: If an option or a plan cannot be used, or sbatch refuses the jobs.
    """
    options = _options(launched, changes)
    own = {number: one | changes for number, one in launched.own.items()}
    launched = replace(launched, options=launched.options | changes, own=own)
    with closing(SweepDir(path, set())):
        submitted = Submitted(path)
        jobs = list(choose.not_finished(_not_in_queue(jobs, submitted)))
        for job in jobs:  # a request that comes from now on counts
            cancel_request.clear(job.directory)
        cluster = Cluster.ask()
        made = [
            (job, *_plan(job, path, launched, options, submitted, cluster, changes)) for job in jobs
        ]
        choose.warn_of_changed_code((job, one) for job, one, _ in made)
        launched.write(path)
        folder = log_folder(options.submitit_folder, path)
        groups = [_group(one, own) for _, one, own in made]
        bundles = bundle_paths(submissions(path))
        for call in batches(groups, folder, bundles, cluster.max_array_size):
            members = [made[index] for index in call.members]
            for job, one, _ in members:
                replace(one, launch=call.bundle.name).write(job.directory)
                (forge_dir(job.directory) / STATE).unlink(missing_ok=True)
                jsonl.append(job_ledger(job.directory), "resumed", changes=changes)
            write_unpacked(call.bundle, [job.directory for job, _, _ in members])
            numbers = [job.number for job, _, _ in members]
            try:
                call.submit(submitted, numbers, [one.composed for _, one, _ in members])
            except SlurmRefused as error:
                for job, _, _ in members:
                    jsonl.append(job_ledger(job.directory), "refused", text=str(error))
                problem = f"sbatch did not accept the batch script {call.path}:\n{error}"
                raise ConfigError([problem], "The submission") from error
            for job, _, _ in members:
                messages.say(f"job {job.number}: submitted as {submitted.ids[job.number]}")
    return 0


def _options(launched: LaunchRecord, changes: dict[str, Any]) -> SlurmOptions:
    known = {one: launched.options[one] for one in launched.options if one != "_target_"}
    return slurm_options.read(known | changes)


def _not_in_queue(jobs: Sequence[SweepJob], submitted: Submitted) -> Iterator[SweepJob]:
    """The jobs that Slurm does not have in its queue; says which ones it has.

    Raises:
        ConfigError: If Slurm does not answer.
    """
    try:
        queue = client.queue()
    except SlurmRefused as error:
        problem = (
            f"the cluster does not say which jobs are in its queue: {error}. Run the command again"
            " when the cluster answers."
        )
        raise ConfigError([problem], "The sweep") from error
    submitted.find_lost(queue)
    for job in jobs:
        # Another `forge resume` has perhaps submitted it, since the job was read.
        slurm_id = submitted.ids.get(job.number) or job.slurm_id
        script = submitted.scripts.get(job.number, "")
        known = queue.get(slurm_id)
        if known is not None and known.is_alive and known.script == script:
            messages.say(f"job {job.number} is in the queue as {slurm_id}: nothing to do")
        else:
            yield job


def _plan(
    job: SweepJob,
    path: Path,
    launched: LaunchRecord,
    options: SlurmOptions,
    submitted: Submitted,
    cluster: Cluster,
    changes: dict[str, Any],
) -> tuple[JobPlan, SlurmOptions]:
    """The job's plan with the launcher's options of now, and these options."""
    if not (forge_dir(job.directory) / PLAN).exists():  # it has never started
        script = submitted.scripts.get(job.number)
        if script is None:
            problem = (
                f"job {job.number} was never submitted. Run the sweep's own command, which submits"
                f" it: `sh {forge_dir(path)}/resume.sh`"
            )
            raise ConfigError([problem], "The sweep")
        name = Path(script).with_suffix(".bundle").name
        unpack(submissions(path) / name, submitted.indices[job.number])
    made = plan.read(job.directory)
    before = Path(launched.path or path) / job.directory.relative_to(path)
    made = snapshot.moved(choose.moved(made, before, job.directory), path)
    own = replace(options, **launched.own.get(str(job.number), {}))
    slurm = step_plan(own, job.directory, cluster, job_name(own, job.number, job.label))
    if made.slurm is not None:
        slurm = replace(slurm, exclude_h=made.slurm.exclude_h)
    return replace(made, slurm=slurm, time_limit_s=own.time_limit_s), own


def _group(made: JobPlan, options: SlurmOptions) -> OptionGroup:
    name = made.slurm.name if made.slurm is not None else ""
    if made.requeue.is_up_to_site:
        return OptionGroup(options, None, 0.0, None, name)
    return OptionGroup(options, made.signal, made.warning_s, made.requeue.enabled, name)
